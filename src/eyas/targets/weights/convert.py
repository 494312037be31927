"""A GGUF file becomes a Hugging Face folder once; later loads map that copy.

The copy lies in $EYAS_CACHE or ~/.cache/eyas, below "converted", under a name made from the file's size,
time and sampled content and from the wanted dtype. It is written under a temporary name and moved, so a
broken-off conversion leaves nothing that looks whole.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.core.errors import ModelFormatError
from eyas.core.model_config import TargetConfig
from eyas.targets.families import hf_shapes
from eyas.targets.gguf_config import config_from_gguf
from eyas.targets.hf_config import config_to_hf
from eyas.targets.weights.gguf import GGUFTensors
from eyas.targets.weights.gguf_file import GGUFFile
from eyas.targets.weights.safetensors import INDEX, SINGLE

SOURCE = "eyas_source.json"
"""Beside the weights of a converted copy: where it came from."""
_VERSION = 1
"""Part of the key: raise it when the conversion changes."""
_SHARD_BYTES = 2 << 30
_BLOCK = 1 << 20


def cache_root() -> Path:
    """$EYAS_CACHE or ~/.cache/eyas."""
    return Path(os.environ.get("EYAS_CACHE") or Path.home() / ".cache" / "eyas")


def converted(path: Path, dtype: torch.dtype, write_tokenizer: Callable[[GGUFFile, Path], None]) -> Path:
    """Folder with the converted copy of the GGUF file at `path` in `dtype`, made now if there is none.

    `write_tokenizer(file, folder)` adds the tokenizer's files. ModelFormatError if the file is damaged or
    the cache cannot be written.
    """
    name = str(dtype).removeprefix("torch.")
    folder = cache_root() / "converted" / f"{path.stem}-{name}-{_key(path)}"
    if (folder / SOURCE).is_file():
        return folder
    file = GGUFFile(path)
    config = config_from_gguf(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as scratch:
            partial = Path(scratch) / "copy"
            partial.mkdir()
            _write_weights(GGUFTensors(file, config), config, dtype, partial)
            write_tokenizer(file, partial)
            _write_json(partial / "config.json", config_to_hf(config, name))
            _write_json(partial / SOURCE, {"name": path.stem, "file": path.name, "size": path.stat().st_size})
            _move(partial, folder)
    except OSError as error:
        raise ModelFormatError(
            f"{folder}: the converted copy of {path.name} cannot be written ({error}); set EYAS_CACHE "
            "to a folder with space"
        ) from None
    return folder


def _move(partial: Path, folder: Path) -> None:
    """Put the finished copy in place; if another process was faster, its copy is as good."""
    if folder.exists() and not (folder / SOURCE).is_file():
        shutil.rmtree(folder)
    try:
        partial.replace(folder)
    except OSError:
        if not (folder / SOURCE).is_file():
            raise


def _write_weights(source: GGUFTensors, config: TargetConfig, dtype: torch.dtype, folder: Path) -> None:
    """Decode every tensor into shards of about 2 GiB, so that memory does not grow with the model."""
    shards = _shards(hf_shapes(config), torch.finfo(dtype).bits // 8)
    files: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {
            name: source.get(name, shape).to(dtype).contiguous() for name, shape in names.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {}, "weight_map": files})


def _shards(shapes: dict[str, tuple[int, ...]], item_size: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, cut into groups of at most _SHARD_BYTES (a larger tensor stands alone)."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = item_size * torch.Size(shape).numel()
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def _key(path: Path) -> str:
    """Digest of size, time, head, tail and 14 blocks between; all of a large file would take seconds."""
    stat = path.stat()
    digest = hashlib.sha256(f"{_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for part in range(16):
            file.seek(max(0, stat.st_size - _BLOCK) * part // 15)
            digest.update(file.read(_BLOCK if part in {0, 15} else 4096))
    return digest.hexdigest()[:16]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
