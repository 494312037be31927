"""The trainer, one for every objective: data in, head folder out, resumable at any step.

    out/config.json model.safetensors eyas.json    the head (drafters/artifact.py)
    out/recipe.yaml                                the resolved recipe
    out/training_log.jsonl                         a record every log_every steps and at validations
    out/checkpoints/                               see checkpoint.py

A step is: prepare `accumulation` batches (slots chosen, so the number of supervised slots is known), run
each, clip, update. The host reads values back only when it logs.
"""

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas import __version__
from eyas.config import dump_config
from eyas.config.dump import to_plain
from eyas.core.errors import DataError, EyasError
from eyas.data.files import write_bytes
from eyas.data.loader import Batch, LoaderState, RowLoader, pack_rows, split_documents
from eyas.data.store import TokenStore
from eyas.data.vocab_count import count_tokens
from eyas.drafters.artifact import save_head
from eyas.targets.base import Target
from eyas.training.build import build_head, describe, make_objective
from eyas.training.checkpoint import RunState, fingerprint, list_checkpoints, load_checkpoint, save_checkpoint
from eyas.training.config import TrainConfig
from eyas.training.display import Display, Log, QuietDisplay
from eyas.training.optim import MovingAverage, learning_rate, make_optimizer
from eyas.training.rows import draft_rows
from eyas.training.step import StepResult, TrainStep
from eyas.training.validate import measure

Evaluate = Callable[[Path], dict[str, Any]]
"""Real decoding with the head in a folder; its result goes to eyas.json. Handed in: no engine here."""


@dataclass(slots=True)
class _Window:
    """Sums since the last log record."""

    loss: Tensor
    hits: Tensor
    counts: Tensor
    steps: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)


class Trainer:
    """Builds everything from a recipe; `train()` runs it to the end and writes the head."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        store: TokenStore,
        *,
        template_ids: frozenset[int] = frozenset(),
        display: Display | None = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.config, self.target, self.store = config, target, store
        self.display, self.evaluate = display or QuietDisplay(), evaluate
        self.out = Path(config.run.out)
        if int(store.manifest["vocab_size"]) != target.config.vocab_size:
            raise DataError(
                f"{config.data.store}: made for a vocabulary of {store.manifest['vocab_size']}, "
                f"the target has {target.config.vocab_size}"
            )
        self.counts = count_tokens(store)
        self.objective = make_objective(config.objective)
        self.model, self.vocab_map, self.coverage = build_head(config, target, self.counts, template_ids)
        self.parameters: list[nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, config.optim)
        self.average = MovingAverage(self.parameters, config.optim.ema) if config.optim.ema else None
        training, held_out = split_documents(store, config.data.held_out)
        self.loader = RowLoader(
            store,
            training,
            seq_len=config.data.seq_len,
            batch_rows=config.run.batch_rows,
            seed=config.run.seed,
            device=target.device,
        )
        self.batches_per_epoch = self.loader.batches_per_epoch()
        self.total_steps = self._total_steps()
        self.validation = self._validation_rows(held_out)
        self.step = TrainStep(
            target,
            self.model,
            self.vocab_map,
            self.objective,
            config.loss,
            autocast=self._autocast(),
            compiled=config.run.compile,
        )
        self.state = RunState()
        self._started = time.monotonic()
        self._startup: float | None = None
        """Seconds of this leg's first step: compilation, which a schedule by time must not follow."""
        self._supervised: tuple[int, list[int]] = (-1, [])
        self._last_validation: dict[str, Any] = {}

    def _autocast(self) -> torch.dtype | None:
        wanted = self.config.run.precision
        bfloat16 = wanted == "bfloat16" or (wanted == "auto" and self.target.device.type == "cuda")
        return torch.bfloat16 if bfloat16 else None

    def _validation_rows(self, held_out: Any) -> Batch | None:
        if not len(held_out) or not self.config.run.validate_rows:
            return None
        rows = pack_rows(self.store, self.loader.mask, held_out, self.config.data.seq_len, seed=0)
        size, device = self.config.run.validate_rows, self.target.device
        tensors = (rows.ids, rows.segments, rows.positions, rows.supervised)
        return Batch(*(tensor[:size].to(device) for tensor in tensors))

    # -- a run ------------------------------------------------------------------------------------------

    def train(self) -> Path:
        """Run to the end of the recipe (or on from the newest checkpoint); returns the head's folder."""
        run, identity = self.config.run, fingerprint(to_plain(self.config), self.store.manifest["hash"])
        checkpoints = self.out / "checkpoints"
        found = list_checkpoints(checkpoints) if run.resume else []
        if found:
            self.state = load_checkpoint(
                found[-1], model=self.model, optimizer=self.optimizer, average=self.average, identity=identity
            )
            self.loader.state = LoaderState(self.state.epoch, self.state.batch)
        log = Log(self.out, self.config, after_step=self.state.step)
        write_bytes(self.out / "recipe.yaml", dump_config(self.config).encode())
        self.display.start(self._header())
        self._started = time.monotonic() - self.state.seconds
        window = self._new_window()
        try:
            while not self._finished():
                self._one_step(window)
                step = self.state.step
                if step % run.log_every == 0:
                    self._record(log, self._summary(window))
                    window = self._new_window()
                if run.validate_every and step % run.validate_every == 0:
                    self._validate(log)
                if run.checkpoint_every and step % run.checkpoint_every == 0:
                    self._checkpoint(checkpoints, identity)
            if window.steps:
                self._record(log, self._summary(window))
            if run.checkpoint_every:
                self._checkpoint(checkpoints, identity)
            if self._last_validation.get("step") != self.state.step:
                self._validate(log)
            return self._finish(log)
        finally:
            self.display.stop()
            log.close()
            self.loader.close()

    @property
    def seconds(self) -> float:
        """Wall clock of the run, earlier legs included."""
        return time.monotonic() - self._started

    def _total_steps(self) -> int | None:
        """Optimizer steps of the recipe where epochs or max_steps say so."""
        run = self.config.run
        limits = [] if run.max_steps is None else [run.max_steps]
        if run.epochs is not None:
            limits.append(max(1, round(run.epochs * self.batches_per_epoch / run.accumulation)))
        return min(limits) if limits else None

    def progress(self) -> float:
        """How far the run is, in [0, 1], by what the schedule follows."""
        run = self.config.run
        if run.schedule_by == "time":
            assert run.max_minutes is not None
            startup = self._startup or 0.0
            return (self.seconds - startup) / max(60 * run.max_minutes - startup, 1e-9)
        assert self.total_steps is not None
        return self.state.step / self.total_steps

    def _finished(self) -> bool:
        run = self.config.run
        if self.total_steps is not None and self.state.step >= self.total_steps:
            return True
        return run.max_minutes is not None and self.seconds >= 60 * run.max_minutes

    def _one_step(self, window: _Window) -> None:
        run, began = self.config.run, self.seconds
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._next_progress(), self.config.optim)
        prepared = []
        for micro in range(run.accumulation):
            place = self.loader.state.batch * run.batch_rows
            per_row = self._supervised_rows(self.loader.state.epoch)
            batch = self.loader.next()
            seed = (run.seed * 1_000_003 + self.state.step) * 1_009 + micro
            prepared.append(
                self.step.prepare(
                    batch,
                    per_row[place : place + run.batch_rows],
                    seed=seed,
                    max_supervised=_round_up(max(per_row), 32),
                )
            )
        normaliser = torch.stack([self.step.normaliser(item) for item in prepared]).sum()
        for item in prepared:
            self._add(window, self.step.run(item, normaliser))
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = run.accumulation * run.batch_rows * self.config.data.seq_len
        window.steps += 1
        window.tokens += tokens
        self.state = RunState(
            self.state.step + 1,
            self.loader.state.epoch,
            self.loader.state.batch,
            self.seconds,
            self.state.tokens + tokens,
        )
        if self._startup is None:
            self._startup = self.seconds - began
        if self.average is not None:
            self.average.update(self.state.step)

    def _next_progress(self) -> float:
        """Progress in the middle of the coming step by steps; now, by time."""
        if self.config.run.schedule_by == "time":
            return self.progress()
        assert self.total_steps is not None
        return (self.state.step + 0.5) / self.total_steps

    def _supervised_rows(self, epoch: int) -> list[int]:
        """Supervised draft rows of every packed row of an epoch; read back once an epoch."""
        if self._supervised[0] != epoch:
            rows = self.loader.epoch_rows(epoch)
            self._supervised = (epoch, draft_rows(rows).supervised.sum(1).tolist())
        return self._supervised[1]

    # -- records ----------------------------------------------------------------------------------------

    def _new_window(self) -> _Window:
        device = self.target.device
        zero = torch.zeros(self.objective.num_depths, device=device)
        return _Window(torch.zeros((), device=device, dtype=torch.float64), zero, zero.clone())

    @staticmethod
    def _add(window: _Window, result: StepResult) -> None:
        window.loss += result.loss
        window.hits += result.hits
        window.counts += result.counts

    def _summary(self, window: _Window) -> dict[str, Any]:
        loss = float(window.loss) / window.steps
        if not math.isfinite(loss):
            raise EyasError(
                f"the loss is {loss} at step {self.state.step}; lower optim.lr. The newest checkpoint in "
                f"{self.out / 'checkpoints'} is from before"
            )
        accuracy = (window.hits / window.counts.clamp(min=1)).tolist()
        return {
            "kind": "train",
            "step": self.state.step,
            "epoch": self.state.epoch,
            "seconds": round(self.seconds, 2),
            "tokens": self.state.tokens,
            "loss": loss,
            "accuracy": [round(share, 4) for share in accuracy],
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": round(window.tokens / (time.monotonic() - window.started), 1),
        }

    def _record(self, log: Log, record: dict[str, Any]) -> None:
        log.write(record)
        self.display.update(min(self.progress(), 1.0), record)

    def _validate(self, log: Log) -> None:
        if self.validation is None:
            return
        if self.average is not None:
            self.average.swap()
        try:
            rows = min(8, self.config.run.batch_rows)
            count = measure(self.step, self.vocab_map, self.validation, batch_rows=rows)
        finally:
            if self.average is not None:
                self.average.swap()
        self._last_validation = {
            "kind": "validation",
            "step": self.state.step,
            "seconds": round(self.seconds, 2),
            "acceptance": [round(share, 4) for share in count.acceptance],
            "reached": count.reached,
            "simulated_al": round(count.simulated_al, 4),
        }
        self._record(log, self._last_validation)

    def _checkpoint(self, folder: Path, identity: dict[str, Any]) -> None:
        save_checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            average=self.average,
            state=self.state,
            identity=identity,
            keep=self.config.run.keep_checkpoints,
        )

    def _header(self) -> dict[str, Any]:
        manifest = self.store.manifest
        return {
            "target": self.target.identity.name,
            "preset": self.config.preset,
            "objective": to_plain(self.config.objective),
            "head": {**to_plain(self.config.head), **describe(self.model, self.coverage)},
            "data": {
                **to_plain(self.config.data),
                **{key: manifest[key] for key in ("num_documents", "num_tokens", "num_supervised", "hash")},
            },
            "loss": to_plain(self.config.loss),
            "optim": to_plain(self.config.optim),
            "run": {
                **to_plain(self.config.run),
                "total_steps": self.total_steps,
                "first_step": self.state.step,
            },
            "decoding": to_plain(self.config.decoding),
        }

    # -- the end ----------------------------------------------------------------------------------------

    def _finish(self, log: Log) -> Path:
        if self.average is not None:
            self.average.swap()
        meta = {
            **self._header(),
            "recipe": to_plain(self.config),
            "validation": self._last_validation,
            "training": {
                "steps": self.state.step,
                "epochs": round(self.state.epoch + self.state.batch / self.batches_per_epoch, 3),
                "tokens": self.state.tokens,
                "seconds": round(self.seconds, 1),
                "device": _device_name(self.target.device),
            },
            "versions": {
                "eyas": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        del meta["target"], meta["decoding"]
        self._save(meta)
        if self.evaluate is not None:
            meta["decoding"] = self.evaluate(self.out)
            log.write({"kind": "decoding", "step": self.state.step, "result": meta["decoding"]})
            self._save(meta)
        return self.out

    def _save(self, meta: dict[str, Any]) -> None:
        save_head(
            self.out,
            self.model,
            self.vocab_map,
            meta=meta,
            identity=self.target.identity,
            packed=self.config.run.packed,
            target_embedding=self.target.decoder.embed_tokens.weight,
            target_lm_head=self.target.decoder.lm_head_weight,
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
