"""Runs a study's variants, one or a few at a time; what is finished is skipped, the rest goes on.

    out/study.json               question, baseline, order of the variants
    out/NAME/variant.json        state (running, finished, failed), resolved recipe, sizes
    out/NAME/training_log.jsonl  the trainer's own log
    out/study.jsonl              all validations of all variants (study_records.py), made anew from the logs

The target is loaded once and its compiled forward serves every variant; checkpoints go when a variant is
finished, weights too unless they are wanted. A variant that fails (its loss is no longer a number) is
a result: it is recorded, and the next one runs.
"""

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.config.dump import to_plain
from eyas.core.device import device_name
from eyas.core.errors import ConfigError, EyasError, out_of_memory
from eyas.data.files import make_folder, read_manifest, write_json
from eyas.data.store import FORMAT
from eyas.training.checkpoint import fingerprint
from eyas.training.config import TrainConfig
from eyas.training.display import QuietDisplay
from eyas.training.study import Plan, Study
from eyas.training.study_records import collect
from eyas.training.study_together import SharedCapture, in_turn
from eyas.training.trainer import Paused, Trainer

OpenTrainer = Callable[[TrainConfig, Any], Trainer]
"""From a recipe and a display to its Trainer; keeps target and store between calls."""
Say = Callable[[str], None]


class StudyDisplay(QuietDisplay):
    """One line for each validation."""

    def __init__(self, name: str, steps: int, say: Say) -> None:
        self.name, self.steps, self.say = name, steps, say

    def update(self, progress: float, record: dict[str, Any]) -> None:
        """Say how far the variant is and how good."""
        del progress
        if record["kind"] == "validation":
            self.say(
                f"{self.name}: step {record['step']} of {self.steps}, {record['seconds']:.0f} s, "
                f"simulated AL {record['simulated_al']:.3f}"
            )


def run_study(
    study: Study,
    plans: Sequence[Plan],
    out: Path,
    open_trainer: OpenTrainer,
    *,
    deadline: float | None = None,
    keep_heads: bool = False,
    together: int = 1,
    say: Say = print,
) -> bool:
    """Run `plans` to their ends, or until time.monotonic() passes `deadline`; whether all are finished.

    So many of them `together`, in turn, step by step (study_together.py).

    Raises ConfigError where `out` holds a variant of the same name that was trained otherwise.
    """
    make_folder(out)
    write_json(out / "study.json", describe(study))
    waiting = [plan for plan in plans if not _is_finished(plan, out)]
    for plan in plans:
        if plan not in waiting:
            say(f"{plan.name}: finished before")
    _allow_recompilation([plan.config for plan in waiting])
    complete = True
    asked = SharedCapture()
    for first in range(0, len(waiting), together):
        if deadline is not None and time.monotonic() >= deadline:
            say(f"{waiting[first].name}: no time left; the same command goes on from here")
            return False
        runs: list[_Run] = []
        try:
            for plan in waiting[first : first + together]:
                runs.append(_Run(plan, out, open_trainer, deadline, keep_heads=keep_heads, say=say))
                asked.join(runs[-1].trainer)
            in_turn([run.steps() for run in runs])
        finally:
            states = [run.close() for run in runs]
            collect(out)
        complete &= all(state == "finished" for state in states)
        if "running" in states:
            return False
    return complete


def describe(study: Study) -> dict[str, Any]:
    """What out/study.json holds."""
    config = study.config
    return {
        "study": study.name,
        "question": config.question,
        "baseline": config.baseline,
        "beside": list(config.beside),
        "against": dict(config.against),
        "steps": config.steps,
        "depths": config.depths,
        "variants": [plan.name for plan in study.plans],
    }


def identity(config: TrainConfig) -> dict[str, Any]:
    """What must be the same for a finished variant to count as this one."""
    plain = to_plain(config)
    manifest = read_manifest(Path(config.data.store) / "manifest.json", FORMAT)
    compared = ("max_steps", "validate_every", "validate_rows", "validate_depths", "validate_seq_len")
    return fingerprint(plain, str(manifest["hash"])) | {key: plain["run"][key] for key in compared}


def _is_finished(plan: Plan, out: Path) -> bool:
    """Whether the variant is finished; ConfigError where its folder is of another one."""
    path = out / plan.name / "variant.json"
    if not path.exists():
        return False
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        before, state = about["identity"], about["state"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: damaged ({error}); remove this folder to train the variant anew"
        ) from None
    now = identity(plan.config)
    changed = sorted(key for key in now | before if now.get(key) != before.get(key))
    if changed:
        raise ConfigError(
            f"{path.parent}: was trained with another {', '.join(changed)}; use another --out, or remove it"
        )
    return bool(state == "finished")


class _Run:
    """One variant while it is trained."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        open_trainer: OpenTrainer,
        deadline: float | None,
        *,
        keep_heads: bool,
        say: Say,
    ) -> None:
        self.plan, self.folder, self.keep_heads, self.say = plan, out / plan.name, keep_heads, say
        make_folder(self.folder)
        steps = plan.config.run.max_steps
        assert steps is not None
        trainer: Trainer = open_trainer(plan.config, StudyDisplay(plan.name, steps, say))
        trainer.deadline = deadline
        self.trainer, self.state = trainer, "running"
        self.about = {
            "variant": plan.name,
            "num_trained_parameters": trainer.facts["num_trained_parameters"],
            "draft_vocab_coverage": trainer.facts["draft_vocab_coverage"],
            "steps_per_epoch": trainer.batches_per_epoch / plan.config.run.accumulation,
            "device": device_name(trainer.target.device),
            "torch": torch.__version__,
            "identity": identity(plan.config),
            "recipe": to_plain(plan.config),
        }
        self._write("running")

    def _write(self, state: str, **more: str) -> None:
        self.state = state
        write_json(self.folder / "variant.json", self.about | {"state": state, **more})

    def steps(self) -> Iterator[int]:
        """Train, a step at a time; a variant that fails or pauses only ends."""
        try:
            yield from self.trainer.steps()
        except Paused as pause:
            self.say(str(pause))
            return
        except (EyasError, RuntimeError) as error:
            if not isinstance(error, EyasError) and not out_of_memory(error):
                raise
            self.say(f"{self.plan.name}: failed: {error}")
            self._write("failed", error=str(error))
            return
        self._write("finished")
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        if not self.keep_heads:
            for name in ("model.safetensors", "config.json"):
                (self.folder / name).unlink(missing_ok=True)

    def close(self) -> str:
        """Give the trainer's memory back; the state that the variant is left in."""
        del self.trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.state


def _allow_recompilation(configs: list[TrainConfig]) -> None:
    """Let each variant compile its own shapes: past eight, torch would quietly run eagerly.

    Nothing is reset between variants, so what has the same shapes (the target, above all) is compiled once.
    """
    if any(config.run.compile for config in configs):
        from torch._dynamo import config as limits

        limits.recompile_limit = max(limits.recompile_limit, 16 * len(configs))
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 128 * len(configs))
