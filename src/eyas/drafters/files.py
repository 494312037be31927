"""Reading and writing a head's files: safetensors and JSON only, written to a temporary name and moved."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.core.errors import ConfigError, ModelFormatError


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON with two spaces of indentation."""
    _replace(path, lambda name: name.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8"))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write safetensors; tensors may be on any device and share memory."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _replace(path, lambda name: save_file(ready, name, metadata={"format": "pt"}))


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; ModelFormatError names the file otherwise."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFormatError(
            f"{path} is missing; a head is a folder with config.json and model.safetensors"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFormatError(f"{path} must hold a JSON object")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: model.safetensors, or the shards of model.safetensors.index.json."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        paths = [folder / "model.safetensors"]
    elif index.exists():
        paths = sorted({folder / Path(name).name for name in read_json(index)["weight_map"].values()})
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt")
        )
        hint = f"; {pickles[0]} is a pickle and is never read, convert it to safetensors" if pickles else ""
        raise ModelFormatError(f"{folder} has no model.safetensors{hint}")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ModelFormatError(f"{path} cannot be read as safetensors: {error}") from error
    return tensors


def refuse_foreign(folder: Path) -> None:
    """ConfigError for a folder that holds a model of somebody else's; a head of ours may be replaced."""
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror}); choose another folder") from None
    there = next((name for name in ("config.json", "model.safetensors") if name in names), None)
    if there is not None and "eyas.json" not in names:
        raise ConfigError(f"{folder} holds a {there} that eyas did not write; choose another folder")


def _replace(path: Path, write: Any) -> None:
    """Call write(temporary path), then move it to `path`; ConfigError if there is no such place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: cannot be made a folder ({error.strerror}); choose another"
        ) from None
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.chmod(0o644)  # safetensors writes for its owner only
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
