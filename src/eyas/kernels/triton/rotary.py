"""Rotary embedding: of loose heads, of fused qkv rows with the write to the cache; look-up of angles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton import pdl
from eyas.kernels.triton.pdl import EARLY, LATE, let_in, wait


@triton.jit
def _angles_kernel(  # noqa: ANN202
    positions_ptr,  # noqa: ANN001
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    cos_out_ptr,  # noqa: ANN001
    sin_out_ptr,  # noqa: ANN001
    max_position,  # noqa: ANN001
    half,  # noqa: ANN001
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)
    column = tl.arange(0, BLOCK)
    mask = column < half
    cos = tl.load(cos_ptr + position * half + column, mask=mask)
    sin = tl.load(sin_ptr + position * half + column, mask=mask)
    tl.store(cos_out_ptr + row * half + column, cos, mask=mask)
    tl.store(sin_out_ptr + row * half + column, sin, mask=mask)


def angles(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.rotary.angles."""
    max_position, half = cos.shape
    cos_out, sin_out = cos.new_empty((2, *positions.shape, half)).unbind(0)
    if positions.numel():
        _angles_kernel[(positions.numel(),)](
            positions.contiguous(),
            cos,
            sin,
            cos_out,
            sin_out,
            max_position,
            half,
            BLOCK=triton.next_power_of_2(half),
        )
    return cos_out, sin_out


@triton.jit
def rotated(  # noqa: ANN201
    x_ptr,  # noqa: ANN001
    where,  # noqa: ANN001
    token,  # noqa: ANN001
    live,  # noqa: ANN001
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    norm_ptr,  # noqa: ANN001
    eps,  # noqa: ANN001
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads [N, BLOCK_D] that begin at x_ptr + where [N] and belong to rows token [N] of cos and sin.

    Each element is loaded beside its partner in the other half. The rounding of every operation is spelt
    out, so that all kernels that call this give a head the same bits.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    x = tl.load(x_ptr + where[:, None] + d[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + where[:, None] + partner[None, :], mask=mask, other=0.0)
    element = x.dtype
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
        x = (wide * factor).to(element) * tl.load(norm_ptr + d, mask=d < HEAD_DIM, other=0.0)[None, :]
        y = (y.to(tl.float32) * factor).to(element)
        y = y * tl.load(norm_ptr + partner, mask=d < HEAD_DIM, other=0.0)[None, :]
    angle = token[:, None] * HALF + (d % HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(element).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(element).to(tl.float32)
    sin = tl.where((d < HALF)[None, :], -sin, sin)
    return tl.fma(y.to(tl.float32), sin, x.to(tl.float32) * cos).to(element)


@triton.jit
def _rope_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    heads,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)
    live = head < heads
    token = tl.zeros([BLOCK_HEADS], tl.int64) + row
    where = row * row_stride + head * HEAD_DIM
    out = rotated(x_ptr, where, token, live, cos_ptr, sin_ptr, x_ptr, 0.0, False, HEAD_DIM, BLOCK_D)  # noqa: FBT003
    d = tl.arange(0, BLOCK_D)
    goal = (row * heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + goal, out, mask=live[:, None] & (d < HEAD_DIM)[None, :])


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See eyas.kernels.reference.rotary.apply_rope. Rows of x may be strided (a slice of fused qkv)."""
    heads, head_dim = x.shape[-2:]
    if x.ndim != 3 or x.stride(-1) != 1 or x.stride(-2) != head_dim:
        x = x.contiguous().reshape(-1, heads, head_dim) if x.ndim != 3 else x.contiguous()
    lead = cos.shape[:-1]
    out = torch.empty((x.shape[0], heads, head_dim), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _rope_kernel[(x.shape[0],)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(0),
            heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_HEADS=triton.next_power_of_2(heads),
            enable_fp_fusion=False,
        )
    return out.reshape(*lead, heads, head_dim)


@triton.jit
def _rotate_and_cache_kernel(  # noqa: ANN202
    qkv_ptr,  # noqa: ANN001
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    q_norm_ptr,  # noqa: ANN001
    k_norm_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    key_cache_ptr,  # noqa: ANN001
    value_cache_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    eps,  # noqa: ANN001
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    let_in(PDL, EARLY)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    head = tl.arange(0, BLOCK_HEADS)
    live = head < NUM_HEADS
    token = tl.zeros([BLOCK_HEADS], tl.int64) + row
    where = row * row_stride + head * HEAD_DIM
    query = rotated(
        qkv_ptr, where, token, live, cos_ptr, sin_ptr, q_norm_ptr, eps, HAS_NORM, HEAD_DIM, BLOCK_D
    )
    goal = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + goal, query, mask=live[:, None] & (d < HEAD_DIM)[None, :])
    slot = tl.load(slots_ptr + row)
    kv_head = tl.arange(0, BLOCK_KV)
    cached = (kv_head < NUM_KV_HEADS) & (slot >= 0)
    token = tl.zeros([BLOCK_KV], tl.int64) + row
    where = row * row_stride + (NUM_HEADS + kv_head) * HEAD_DIM
    key = rotated(
        qkv_ptr, where, token, cached, cos_ptr, sin_ptr, k_norm_ptr, eps, HAS_NORM, HEAD_DIM, BLOCK_D
    )
    mask = cached[:, None] & (d < HEAD_DIM)[None, :]
    value_at = where[:, None] + NUM_KV_HEADS * HEAD_DIM + d[None, :]
    value = tl.load(qkv_ptr + value_at, mask=mask, other=0.0)
    goal = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    let_in(PDL, LATE)
    tl.store(key_cache_ptr + goal, key, mask=mask)
    tl.store(value_cache_ptr + goal, value, mask=mask)


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
    """See eyas.kernels.reference.rotary.rotate_and_cache; rows with slot -1 are not written at all."""
    kv_heads, head_dim = key_cache.shape[2:]
    out = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        has_norm = q_norm is not None and k_norm is not None
        _rotate_and_cache_kernel[(qkv.shape[0],)](
            qkv,
            cos.contiguous(),
            sin.contiguous(),
            q_norm if has_norm else cos,
            k_norm if has_norm else cos,
            slots,
            key_cache,
            value_cache,
            out,
            qkv.stride(0),
            eps,
            HAS_NORM=has_norm,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_HEADS=triton.next_power_of_2(num_heads),
            BLOCK_KV=triton.next_power_of_2(kv_heads),
            enable_fp_fusion=False,
            **pdl.options(small=True),
        )
    return out
