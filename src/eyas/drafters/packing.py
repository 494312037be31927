"""Packed heads: every matrix as int8 with one float32 scale a row; small tensors stay float32.

    weight[r, :] ~ scale[r] * int8[r, :]     scale[r] = max |weight[r, :]| / 127     error <= scale[r] / 2

Names are the public ones; the scale of `fc.weight` is `fc.weight.scale`.
"""

import torch
from torch import Tensor

from eyas.core.errors import ModelFormatError

SCALE = ".scale"
PACKED_FORMAT = "int8-rows"


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to int8 and scales; vectors, single rows and [1, 1, n] to float32; integers unchanged."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            packed[name] = tensor
        elif tensor.ndim != 2 or tensor.shape[0] == 1:
            packed[name] = tensor.float()
        else:
            packed[name], packed[name + SCALE] = pack_rows(tensor)
    return packed


def unpack(tensors: dict[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """The inverse of `pack`, in float32. Raises ModelFormatError where a scale is missing."""
    unpacked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            if name.removesuffix(SCALE) not in tensors:
                raise ModelFormatError(f"{where}: tensor {name} has no matrix beside it")
            continue
        if tensor.dtype != torch.int8:
            unpacked[name] = tensor
            continue
        scale = tensors.get(name + SCALE)
        if scale is None or scale.shape != tensor.shape[:1]:
            raise ModelFormatError(f"{where}: tensor {name} needs {name}{SCALE} with one value a row")
        unpacked[name] = tensor.float() * scale.float()[:, None]
    return unpacked


def pack_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, n] -> (int8 [rows, n], float32 scale [rows]); a row of zeros gets scale 1.

    [[0.5, -1.27]] -> [[50, -127]], [0.01]

    Rows that were unpacked come back bit for bit: a scale that 127 * scale / 127 misses by its last bit is
    one step aside, and the only one that gives the row's every number.
    """
    wide = weight.float()
    if not bool(torch.isfinite(wide).all()):
        raise ModelFormatError("a weight is infinite or NaN; the head cannot be packed")
    largest = wide.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    codes = (wide / scale[:, None]).round().clamp(-127, 127)
    for side in (0.0, torch.inf):
        aside = torch.nextafter(scale, torch.full_like(scale, side))
        missed = (codes * scale[:, None] != wide).any(1)
        scale = torch.where(missed & (codes * aside[:, None] == wide).all(1), aside, scale)
    return codes.to(torch.int8), scale
