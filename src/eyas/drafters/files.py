"""Reading and writing a head's files: safetensors and JSON only, written to a temporary name and moved."""

import filecmp
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.core.errors import ConfigError, ModelFormatError


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON with two spaces of indentation."""
    _place({path: _json_writer(values)})


def write_head(
    folder: Path, *, about: dict[str, Any], tensors: dict[str, Tensor], config: dict[str, Any]
) -> None:
    """Put eyas.json, model.safetensors and config.json into a folder; a kill at any moment does no harm.

    All are written before the first is moved; files that stay the same are left alone. Otherwise an old
    config.json goes first and the new one comes last: what lies in between has none, and is no head to any
    reader. eyas.json comes before the weights, so that the folder is known as ours (`refuse_foreign`) and
    may be written to again. Tensors may be on any device and share memory.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _place(
        {
            folder / "eyas.json": _json_writer(about),
            folder / "model.safetensors": lambda name: save_file(ready, name, metadata={"format": "pt"}),
            folder / "config.json": _json_writer(config),
        }
    )


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
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelFormatError(f"{index}: weight_map must give the file of each tensor")
        paths = sorted({folder / Path(name).name for name in shards.values()})
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


def _json_writer(values: dict[str, Any]) -> Callable[[Path], Any]:
    return lambda name: name.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _place(writers: dict[Path, Callable[[Path], Any]]) -> None:
    """Call each writer with a temporary path, then move the results in order; all lie in one folder.

    ConfigError if there is no such place.
    """
    folder = next(iter(writers)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made a folder ({error.strerror}); choose another") from None
    written = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in writers}
    try:
        for path, temporary in written.items():
            writers[path](temporary)
            temporary.chmod(0o644)  # safetensors writes for its owner only
            _to_disk(temporary)
        changed = [path for path, temporary in written.items() if not _same(path, temporary)]
        if len(changed) > 1:
            (folder / "config.json").unlink(missing_ok=True)
            changed += [folder / "config.json"] if changed[-1].name != "config.json" else []
        for path in changed:
            written[path].replace(path)
    finally:
        for path in written:
            for left in folder.glob(f".{path.name}.*"):  # ours, and those of writers that were killed
                left.unlink(missing_ok=True)


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and filecmp.cmp(path, other, shallow=False)


def _to_disk(path: Path) -> None:
    """Wait until the file's bytes are on the disk, so that no power cut leaves its name without them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
