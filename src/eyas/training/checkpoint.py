"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    out/checkpoints/step-00000500/
        model.safetensors       weights, and the moving average where there is one (prefix "ema.")
        optimizer.safetensors   per parameter: exp_avg, exp_avg_sq, step
        state.json              step, data position, elapsed seconds, validation, recipe and data hash

A checkpoint is written and synced beside its place and moved there whole, so a kill at any moment, or a full
disk, leaves the older ones. Kept are the newest ones and the best by validated acceptance length. Tensors are
whole, however many processes the run had, so it may go on with another number. All random draws are keyed by
(seed, step), so there is no generator state to keep.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.core.errors import ConfigError, EyasError
from eyas.data.files import write_json
from eyas.training.config import TrainConfig
from eyas.training.optim import MovingAverage
from eyas.training.parallel import World

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class RunState:
    """Position of a run."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    validated: float | None = None
    """Simulated acceptance length of these very weights, where they were validated."""


def fingerprint(recipe: dict[str, Any], data_hash: str) -> dict[str, Any]:
    """What must not change between two legs of a run: all but where, how long and how often to report."""
    run = {key: recipe["run"][key] for key in ("seed", "batch_rows", "accumulation")}
    kept = {key: recipe[key] for key in ("data", "head", "objective", "loss", "optim")}
    kept["data"] = {key: value for key, value in kept["data"].items() if key not in ("store", "features")}
    # Gradients are the same for any number of parts.
    parts = ("partitions", "partition_mode")
    kept["objective"] = {key: value for key, value in kept["objective"].items() if key not in parts}
    return json.loads(json.dumps({**kept, "run": run, "data_hash": data_hash}))  # type: ignore[no-any-return]


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())


def best_checkpoint(folder: Path) -> tuple[Path, float] | None:
    """The checkpoint with the largest validated acceptance length, the newest of equals, and that length."""
    found = []
    for place in list_checkpoints(folder):
        try:
            validated = json.loads((place / "state.json").read_text(encoding="utf-8"))["state"]["validated"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or of a version that did not say: not the best
        if isinstance(validated, int | float):
            found.append((float(validated), place))
    return (max(found)[1], max(found)[0]) if found else None


def clean(folder: Path) -> None:
    """Drop what a kill left half written."""
    for half in folder.glob(".step-*.tmp"):
        shutil.rmtree(half, ignore_errors=True)


def check_space(folder: Path, parameters: list[nn.Parameter], *, averaged: bool, keep: int) -> None:
    """Refuse to begin where the run's checkpoints would not fit: the newest, the best, one being written."""
    number = sum(parameter.numel() for parameter in parameters)
    wanted = number * 4 * (4 if averaged else 3) * (keep + 2 - min(len(list_checkpoints(folder)), keep + 1))
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < wanted:
        raise ConfigError(
            f"{folder}: checkpoints of this run need {wanted / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "make room, lower run.keep_checkpoints, or use another run.out"
        )


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: MovingAverage | None,
    state: RunState,
    identity: dict[str, Any],
    keep: int,
    world: World | None = None,
) -> Path:
    """Write a checkpoint under `folder` and drop all but the newest `keep` and the best.

    Every rank calls it, rank 0 writes. One of this step that is there stays and gets the state's validation.
    EyasError where the disk is full: the older checkpoints are untouched.
    """
    world = world or World()
    place = folder / f"step-{state.step:08d}"
    about = {"state": asdict(state), "identity": identity}
    if (place / "state.json").exists():
        if world.is_main:
            write_json(place / "state.json", about)  # the weights are there; a validation may be new
        return place
    parts = (_weights(model, average, world), _moments(model, optimizer, world))
    weights, moments = (_to_cpu(part, keep=world.is_main) for part in parts)
    if not world.is_main:
        return place
    temporary = folder / f".{place.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(weights, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        _sync(temporary / "model.safetensors", temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", about)
        shutil.rmtree(place, ignore_errors=True)  # without state.json it is none
        temporary.rename(place)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        newest = next((path.name for path in reversed(list_checkpoints(folder))), "none")
        raise EyasError(
            f"{place}: the checkpoint could not be written ({error}). Nothing is lost but the steps since "
            f"the newest whole one ({newest}): make room and run again"
        ) from None
    clean(folder)
    best = best_checkpoint(folder)
    for old in list_checkpoints(folder)[:-keep]:
        if best is None or old != best[0]:
            shutil.rmtree(old, ignore_errors=True)
    return place


def load_checkpoint(
    place: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: MovingAverage | None,
    identity: dict[str, Any],
    world: World | None = None,
) -> RunState:
    """Restore everything in place; raises ConfigError naming what differs if it is of another run."""
    world = world or World()
    try:
        stored = json.loads((place / "state.json").read_text(encoding="utf-8"))
        tensors, moments = load_file(place / "model.safetensors"), load_file(place / "optimizer.safetensors")
        known = {field.name for field in fields(RunState)}
        state = RunState(**{key: value for key, value in stored["state"].items() if key in known})
        before = _without_defaults(stored["identity"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{place}: damaged checkpoint ({error}); remove this folder to go on from the one before it"
        ) from None
    now = _without_defaults(identity)
    if before != now:
        changed = sorted(key for key in now | before if before.get(key) != now.get(key))
        raise ConfigError(
            f"{place}: the checkpoint is of a run with another {', '.join(changed)}; use another run.out, or "
            "head.warm_start to begin anew from a head"
        )
    with torch.no_grad():
        for number, (name, parameter) in enumerate(_trained(model)):
            parameter.copy_(world.cut(tensors[name], parameter))
            if average is not None:
                average.shadow[number].copy_(world.local(world.cut(tensors[f"ema.{name}"], parameter)))
            held = {key: moments[f"{name}.{key}"] for key in MOMENTS}
            optimizer.state[parameter] = {
                key: world.cut(value, parameter) if key != "step" else _step(value, parameter)
                for key, value in held.items()
            }
    return state


def load_weights(place: Path, model: nn.Module, world: World, *, averaged: bool) -> None:
    """Copy a checkpoint's weights (their moving average with `averaged`) into the model."""
    tensors = load_file(place / "model.safetensors")
    with torch.no_grad():
        for name, parameter in _trained(model):
            parameter.copy_(world.cut(tensors[f"ema.{name}" if averaged else name], parameter))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _weights(model: nn.Module, average: MovingAverage | None, world: World) -> Iterator[tuple[str, Tensor]]:
    for number, (name, parameter) in enumerate(_trained(model)):
        yield name, world.whole(parameter)
        if average is not None:
            yield f"ema.{name}", world.whole(average.shadow[number], like=parameter)


def _moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _trained(model):
        for key, value in optimizer.state[parameter].items():
            yield f"{name}.{key}", world.whole(torch.as_tensor(value))


def _to_cpu(tensors: Iterator[tuple[str, Tensor]], *, keep: bool) -> dict[str, Tensor]:
    """Gather tensors one by one; other ranks help to gather and keep nothing."""
    return {name: tensor.cpu().contiguous() for name, tensor in tensors if keep}


def _step(value: Tensor, parameter: Tensor) -> Tensor:
    """Adam's count of steps lies where its kernel wants it: beside the weights on CUDA."""
    return value.to(parameter.device) if parameter.is_cuda else value


def _without_defaults(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity without today's defaults: a version that adds a field changes no run."""
    plain: dict[str, Any] = {}
    sections = TrainConfig.section_defaults(str((identity.get("objective") or {}).get("kind")))
    for key, value in identity.items():
        defaults = sections.get(key)
        plain[key] = value
        if isinstance(value, dict) and defaults is not None:
            plain[key] = {k: v for k, v in value.items() if k not in defaults or defaults[k] != v}
    return plain


def _sync(*paths: Path) -> None:
    """Wait until files (or a folder's names) are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
