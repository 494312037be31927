"""RMSNorm in float32, as the Llama family computes it."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32."""
    wide = x.float() if x.dtype != torch.float64 else x
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
