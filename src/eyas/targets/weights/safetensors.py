"""Tensors of a Hugging Face folder, memory-mapped: one model.safetensors or shards with an index."""

from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from eyas.core.errors import ModelFormatError
from eyas.targets.hf_config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class SafetensorsFolder:
    """Looks up tensors of `folder` by name. Every failure is a ModelFormatError naming file and tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._file_of = self._find()

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor `name` (a view of the mapped file), which must have this shape."""
        path = self._file_of.get(name)
        if path is None:
            raise ModelFormatError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete")
        try:
            stored = self._handle(path)
            found = tuple(stored.get_slice(name).get_shape())
            if found != shape:
                raise ModelFormatError(
                    f"{path}: tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}"
                )
            tensor: Tensor = stored.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ModelFormatError(f"{path}: tensor {name} cannot be read ({error})") from None
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelFormatError(
                f"{path}: tensor {name} is {tensor.dtype}; float32, float16 or bfloat16 is needed"
            )
        return tensor

    def _find(self) -> dict[str, Path]:
        """File of every tensor."""
        if (index := self.folder / INDEX).is_file():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict):
                raise ModelFormatError(f"{index}: weight_map is missing")
            files = {name: self.folder / str(file) for name, file in shards.items()}
            for name, file in files.items():
                if file.resolve().parent != self.folder.resolve() and not file.is_symlink():
                    raise ModelFormatError(f"{index}: tensor {name} points outside of the folder ({file})")
                if not file.is_file():
                    raise ModelFormatError(f"{file}: shard is missing; {index.name} says it holds {name}")
            return files
        if (single := self.folder / SINGLE).is_file():
            return dict.fromkeys(self._handle(single).keys(), single)
        pickles = sorted(p.name for pattern in PICKLES for p in self.folder.glob(pattern))
        if pickles:
            raise ModelFormatError(
                f"{self.folder / pickles[0]}: pickled weights can run code when they are opened, so they "
                f"are never read; convert them to safetensors, or get a checkpoint that has {SINGLE}"
            )
        raise ModelFormatError(f"{self.folder}: neither {SINGLE} nor {INDEX} is there")

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safetensors.safe_open(str(path), framework="pt", device="cpu")
            except (OSError, safetensors.SafetensorError) as error:
                raise ModelFormatError(
                    f"{path}: not a complete safetensors file ({error}); download it again"
                ) from None
        return self._open[path]
