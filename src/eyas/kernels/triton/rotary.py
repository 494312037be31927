"""Rotary embedding, one program a row of heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    heads,  # noqa: ANN001
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    mask = (pair < HALF) & (head < heads)
    element = out_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(element).to(tl.float32)
    sin = tl.load(sin_ptr + row * HALF + pair, mask=pair < HALF, other=0.0).to(element).to(tl.float32)
    offset = row * row_stride + head * (2 * HALF) + pair
    first = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    where = row * heads * (2 * HALF) + head * (2 * HALF) + pair
    tl.store(out_ptr + where, (first * cos - second * sin).to(element), mask=mask)
    tl.store(out_ptr + where + HALF, (second * cos + first * sin).to(element), mask=mask)


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
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_HEADS=triton.next_power_of_2(heads),
        )
    return out.reshape(*lead, heads, head_dim)
