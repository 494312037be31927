"""Rotary position embedding, half-split layout (Llama, Mistral, Qwen)."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [..., H, dh] by angles cos, sin [..., dh / 2].

    Element i of the first half pairs with element i of the second half:
    (a, b) -> (a cos - b sin, b cos + a sin).
    """
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    left = torch.addcmul(first * cos, second, sin, value=-1)
    return torch.cat((left, torch.addcmul(second * cos, first, sin)), dim=-1)
