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
def _normed(x, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr):  # noqa: ANN001, ANN202
    """RMSNorm of a row x [BLOCK].

    The same bits in every kernel if PAIRED; else in kernels of as many warps, which lay out x alike.
    """
    wide = x.to(tl.float32)
    if PAIRED:  # noqa: SIM108 - Triton follows one branch of a static if
        total = tl.sum(pair_sum(tl.reshape(wide * wide, (1, BLOCK))))
    else:
        total = tl.sum(wide * wide)
    scale = tl.rsqrt(total * (1.0 / SIZE) + eps)
    # Rounded to the input's type before the weight, as the reference does.
    return (wide * scale).to(x.dtype) * weight


@triton.jit
def _rms_norm_kernel(  # noqa: ANN202
    x_ptr,  # noqa: ANN001
    weight_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    live_ptr,  # noqa: ANN001
    eps,  # noqa: ANN001
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
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
    normed = _normed(tl.load(x_ptr + where, mask=mask, other=0.0), weight, eps, SIZE, BLOCK, PAIRED)
    let_in(PDL, LATE)
    tl.store(out_ptr + where, normed, mask=mask)


@triton.jit
def _sum_norm_kernel(  # noqa: ANN202
    parts_ptr,  # noqa: ANN001
    residual_ptr,  # noqa: ANN001
    weight_ptr,  # noqa: ANN001
    hidden_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    live_ptr,  # noqa: ANN001
    also_ptr,  # noqa: ANN001
    also_stride,  # noqa: ANN001
    eps,  # noqa: ANN001
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same of a row that is yet to be summed: parts [PARTS, rows, SIZE] in order, then the residual."""
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
    part = tl.num_programs(0).to(tl.int64) * SIZE
    residual = tl.load(residual_ptr + where, mask=mask, other=0.0)
    total = tl.load(parts_ptr + where, mask=mask, other=0.0)
    for later in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + later * part + where, mask=mask, other=0.0)
    # Rounded to what is kept, of which the norm is.
    hidden = (total + residual.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
    normed = _normed(hidden, weight, eps, SIZE, BLOCK, PAIRED)
    let_in(PDL, LATE)
    tl.store(hidden_ptr + where, hidden, mask=mask)
    if also_ptr is not None:
        tl.store(also_ptr + row * also_stride + column, hidden, mask=mask)
    tl.store(out_ptr + where, normed, mask=mask)


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
            **_options(block),
        )
    return out


def sum_norm(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    live: Tensor | None = None,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(hidden, rms_norm(hidden)) [T, D], hidden = residual [T, D] + the sum of float32 parts [P, T, D].

    Summed in order and rounded once. Rows from `live` on are left out. `also` [T, D], of any row stride,
    gets hidden too.
    """
    num_parts, rows, size = parts.shape
    residual = residual.contiguous()
    hidden, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    _sum_norm_kernel[(rows,)](
        parts,
        residual,
        weight,
        hidden,
        out,
        live,
        also,
        None if also is None else also.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        PARTS=num_parts,
        **_options(block),
    )
    return hidden, out


def _options(block: int) -> dict[str, int | bool]:
    """Launch options of a norm over `block` columns, of which the bits are."""
    # Up to 2048 wide the products of small models do this themselves, for few rows (linear_short.py).
    paired = block <= 2048
    how = {"PAIRED": paired, "num_warps": 4 if paired else 16, "enable_fp_fusion": False}
    return pdl.options(small=True) | how
