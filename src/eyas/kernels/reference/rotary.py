"""Rotary position embedding, half-split layout (Llama, Mistral, Qwen), and what surrounds it in attention."""

import torch
from torch import Tensor

from eyas.kernels.reference.kv_write import write_kv
from eyas.kernels.reference.norm import rms_norm


def angles(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the tables cos, sin [max_position, dh / 2] at positions [...], clamped into them."""
    index = positions.clamp(0, cos.shape[0] - 1)
    return cos[index], sin[index]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [..., H, dh] by angles cos, sin [..., dh / 2].

    Element i of the first half pairs with element i of the second half:
    (a, b) -> (a cos - b sin, b cos + a sin).
    """
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    left = torch.addcmul(first * cos, second, sin, value=-1)
    return torch.cat((left, torch.addcmul(second * cos, first, sin)), dim=-1)


def rotate_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Write rotated k and v of fused rows qkv [T, (H + 2 KV) dh] to `slots`; return rotated q [T, H, dh].

    cos, sin [T, dh / 2]; caches and slots are those of kv_write.write_kv. q_norm and k_norm [dh], both or
    neither, norm every head before the rotation (Qwen3).
    """
    head_dim, joined = key_cache.shape[-1], num_heads + key_cache.shape[-2]
    heads = qkv.view(len(qkv), -1, head_dim)
    qk, v = heads[:, :joined], heads[:, joined:]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(qk[:, :num_heads], q_norm, eps), rms_norm(qk[:, num_heads:], k_norm, eps)
        qk = torch.cat((q, k), dim=1)
    qk = apply_rope(qk, cos, sin)
    write_kv(qk[:, num_heads:], v, key_cache, value_cache, slots)
    return qk[:, :num_heads]
