"""Reads the header of a GGUF file, metadata and where each tensor lies; no read goes past the file.

Layout (versions 2 and 3, little-endian): magic, version, number of tensors, number of metadata entries;
entries (name, type, value); tensor infos (name, dimensions, block type, offset); padding; tensor data.
Block formats are decoded by the `gguf` package.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.core.errors import ModelFormatError

READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a GGUF file; `shape` is in PyTorch's order."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    begin: int
    num_bytes: int


class GGUFFile:
    """`metadata` and `tensors` of the file at `path`; ModelFormatError where it is cut off or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._where = "header"
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFormatError(f"{path}: cannot be opened ({error})") from None
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ModelFormatError(
                f"{path}: damaged or cut off in {self._where} at byte {self._at} ({error}); download it again"
            ) from None

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor `name`, decoded to float32."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.path}: tensor {name} is missing; the file is incomplete")
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.begin)
        columns = info.num_bytes // (int(np.prod(info.shape[:-1])) or 1)
        decoded = gguf.dequantize(raw.reshape(*info.shape[:-1], columns), info.kind)
        return np.asarray(decoded, dtype=np.float32).reshape(info.shape)

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelFormatError(f"{self.path}: not a GGUF file (it starts with {self._data[:4]!r})")
        self._at = 4
        if (version := self._scalar("I")) not in {2, 3}:
            raise ModelFormatError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        for index in range(num_entries):
            self._where = f"metadata entry {index} of {num_entries}"
            name = self._string()
            self._where = f"metadata {name}"
            self.metadata[name] = self._value(self._scalar("I"))
        infos = [self._tensor_info(index, num_tensors) for index in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelFormatError(
                f"{self.path}: general.alignment = {alignment!r} is not a positive integer"
            )
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add(name, shape, kind, start + offset)

    def _tensor_info(self, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        self._where = f"tensor entry {index} of {count}"
        name = self._string()
        self._where = f"the entry of tensor {name}"
        dims = self._many("Q", self._scalar("I"))
        return name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")

    def _add(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> None:
        try:
            block = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ModelFormatError(f"{self.path}: tensor {name} has unknown block type {kind}") from None
        if block.name not in READABLE:
            raise ModelFormatError(
                f"{self.path}: tensor {name} is stored as {block.name}; supported are {', '.join(READABLE)}"
            )
        block_size, type_size = gguf.GGML_QUANT_SIZES[block]
        if not shape or min(shape) < 1 or shape[-1] % block_size:
            raise ModelFormatError(
                f"{self.path}: tensor {name} has shape {list(shape)}, not blocks of {block_size}"
            )
        count = 1
        for size in shape:
            count *= size
        num_bytes = count * type_size // block_size
        if begin + num_bytes > len(self._data):
            raise ModelFormatError(
                f"{self.path}: tensor {name} ends at byte {begin + num_bytes}, but the file has "
                f"{len(self._data)}; it is cut off, download it again"
            )
        self.tensors[name] = TensorInfo(name, shape, block, begin, num_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _many(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize("<" + code) * count
        if self._at + size > len(self._data):
            raise struct.error(f"{count} values do not fit into the file")
        values = list(struct.unpack_from(f"<{count}{code}", self._data, self._at))
        self._at += size
        return values

    def _string(self) -> str:
        length = self._scalar("Q")
        if self._at + length > len(self._data):
            raise struct.error(f"a text of {length} bytes does not fit into the file")
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise struct.error(f"unknown metadata type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            return self._many(_SCALARS[item], count)
        if item == _ARRAY:
            raise struct.error("nested arrays are not used by any supported model")
        return [self._value(item) for _ in range(count)]
