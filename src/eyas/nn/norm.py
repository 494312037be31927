"""RMSNorm module."""

import torch
from torch import Tensor, nn

from eyas.kernels import dispatch


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size]."""
        return dispatch.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(Norm of residual + x, residual + x), all [..., size]."""
        return dispatch.add_rms_norm(x, residual, self.weight, self.eps)
