"""RMSNorm module, and the residual stream on its way from one norm to the next."""

from typing import NamedTuple

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


class Stream(NamedTuple):
    """The residual stream [..., D], and what the next norm makes of it where that is there already."""

    hidden: Tensor
    normed: Tensor | None = None

    def before(self, norm: RMSNorm) -> tuple[Tensor, RMSNorm | None]:
        """What a product after `norm` reads, and the norm that is left to do."""
        return (self.hidden, norm) if self.normed is None else (self.normed, None)
