"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    out/checkpoints/step-00000500/
        model.safetensors       weights, and the moving average where there is one (prefix "ema.")
        optimizer.safetensors   per parameter: exp_avg, exp_avg_sq, step
        state.json              step, data position, elapsed seconds, recipe and data hash, written last

A checkpoint is written beside its place and moved there whole, so a kill leaves the older ones. All random
draws are keyed by (seed, step), so there is no generator state to keep.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.core.errors import ConfigError
from eyas.data.files import write_json
from eyas.training.optim import MovingAverage


@dataclass(frozen=True, slots=True)
class RunState:
    """Position of a run."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    tokens: int = 0


def fingerprint(recipe: dict[str, Any], data_hash: str) -> dict[str, Any]:
    """What must not change between two legs of a run: all but where, how long and how often to report."""
    run = {key: recipe["run"][key] for key in ("seed", "batch_rows", "accumulation")}
    kept = {key: recipe[key] for key in ("data", "head", "objective", "loss", "optim")}
    kept["data"] = {key: value for key, value in kept["data"].items() if key != "store"}
    return json.loads(json.dumps({**kept, "run": run, "data_hash": data_hash}))  # type: ignore[no-any-return]


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: MovingAverage | None,
    state: RunState,
    identity: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint under `folder` and drop all but the newest `keep`."""
    place = folder / f"step-{state.step:08d}"
    temporary = folder / f".{place.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
    if average is not None:
        tensors |= {f"ema.{name}": t.cpu() for name, t in zip(parameters, average.shadow, strict=True)}
    save_file(tensors, temporary / "model.safetensors")
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            moments[f"{name}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    save_file(moments, temporary / "optimizer.safetensors")
    write_json(temporary / "state.json", {"state": asdict(state), "identity": identity})
    shutil.rmtree(place, ignore_errors=True)
    temporary.rename(place)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())


def load_checkpoint(
    place: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: MovingAverage | None,
    identity: dict[str, Any],
) -> RunState:
    """Restore everything in place; raises ConfigError naming what differs if it is of another run."""
    try:
        stored = json.loads((place / "state.json").read_text(encoding="utf-8"))
        tensors, moments = load_file(place / "model.safetensors"), load_file(place / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{place}: damaged checkpoint ({error}); remove this folder to go on from the one before it"
        ) from None
    if stored["identity"] != identity:
        changed = sorted(key for key in identity if stored["identity"].get(key) != identity[key])
        raise ConfigError(
            f"{place}: the checkpoint is of a run with another {', '.join(changed)}; use another run.out, or "
            "head.warm_start to begin anew from a head"
        )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(parameters.items()):
            parameter.copy_(tensors[name])
            if average is not None:
                average.shadow[number].copy_(tensors[f"ema.{name}"])
            optimizer.state[parameter] = {
                key: moments[f"{name}.{key}"].to(parameter.device)
                if key != "step" or parameter.is_cuda
                else moments[f"{name}.{key}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
    return RunState(**stored["state"])
