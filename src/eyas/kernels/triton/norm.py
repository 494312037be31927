"""RMSNorm, one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton import pdl
from eyas.kernels.triton.pdl import EARLY, LATE, let_in, wait


@triton.jit
def pair_sum(x):  # noqa: ANN001, ANN201
    """Sum of x [N, L] along L, a power of two, as a tree of neighbours: (0 + 1) + (2 + 3) -> [N].

    The order of a sum of two changes nothing, so any kernel gives these bits, however it lays x out.
    """
    total = x
    for _ in tl.static_range(16):
        if total.shape[1] > 1:
            total = tl.sum(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)), axis=2)
    return tl.reshape(total, (x.shape[0],))


@triton.jit
def _rms_norm_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    weight_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    live_ptr,  # noqa: ANN001
    eps,  # noqa: ANN001
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    where = row * SIZE + column
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    let_in(PDL, EARLY)
    wait(PDL)
    if live_ptr is not None:  # noqa: SIM102 - the first is known to the compiler
        if row >= tl.load(live_ptr):
            return
    x = tl.load(x_ptr + where, mask=mask, other=0.0).to(tl.float32)
    # Up to 2048 wide the products of small models do this themselves, for few rows (linear_short.py).
    if BLOCK <= 2048:  # noqa: SIM108 - Triton follows one branch of a static if
        total = tl.sum(pair_sum(tl.reshape(x * x, (1, BLOCK))))
    else:
        total = tl.sum(x * x)
    scale = tl.rsqrt(total * (1.0 / SIZE) + eps)
    # Rounded to the input's type before the weight, as the reference does.
    normed = (x * scale).to(out_ptr.dtype.element_ty)
    let_in(PDL, LATE)
    tl.store(out_ptr + where, normed * weight, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, live: Tensor | None = None) -> Tensor:
    """See eyas.kernels.reference.norm.rms_norm. Rows from `live` int32 [1] on are left out."""
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            live,
            eps,
            SIZE=size,
            BLOCK=block,
            **pdl.options(small=True),
            num_warps=4 if block <= 2048 else 8,
            enable_fp_fusion=False,
        )
    return out
