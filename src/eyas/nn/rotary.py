"""Rotary angles: a table of cos and sin by position, with Llama-3's frequency scaling."""

import math

import torch
from torch import Tensor, nn

from eyas.core.model_config import RopeConfig
from eyas.kernels import dispatch


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, float32 [head_dim / 2].

    "llama3" keeps high frequencies, divides low ones by `factor`, and blends between (Llama 3.1).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return inv / rope.factor
    if rope.kind != "llama3":
        return inv
    wavelength = 2 * math.pi / inv
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * inv / rope.factor + blend * inv
    scaled = torch.where(wavelength > low, inv / rope.factor, inv)
    return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled)


class Rotary(nn.Module):
    """Looks up cos and sin [..., head_dim / 2] of positions [...]; float32, table of max_position rows."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        super().__init__()
        self.rope, self.head_dim, self.max_position = rope, head_dim, max_position
        self.reset()

    def reset(self) -> None:
        """(Re)build the table, on the CPU in float32 whatever the default device is."""
        with torch.device("cpu"):
            positions = torch.arange(self.max_position, dtype=torch.float32)
            angles = torch.outer(positions, inverse_frequencies(self.rope, self.head_dim))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """Follow device moves but keep float32: angles lose their meaning in bfloat16."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != torch.float32:
            device = self.cos.device
            self.reset()
            self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions, clamped into the table (rows past it are dropped by their reader)."""
        return dispatch.angles(positions, self.cos, self.sin)
