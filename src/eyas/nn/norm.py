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
