"""Products of a small model for many rows, with the bits that linear_short.py gives few rows.

There every warp sums one part of K, all at once; here a program goes through the parts, one an iteration, so
that the next part's tiles are on their way and a tile of rows may be as wide as multiplying wants it.
The sums are the same: 16-wide steps of the same instruction, ascending within a part, parts in order.

Legend: K in, OUT out (of one half if GATED), program (tile of BLOCK_OUT outputs, block of BLOCK_ROWS rows).
"""

# ruff: noqa: ANN001, ANN202 - bodies and arguments are Triton's, not Python's
import triton
import triton.language as tl

from eyas.kernels.triton.linear_kernels import _begin, _counted, _finish, _idle, _load, _place
from eyas.kernels.triton.linear_short import STEP, _moved
from eyas.kernels.triton.pdl import LATE, let_in


@triton.jit
def _slice(
    address,
    mask,
    part,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BIT: tl.constexpr,
    AXIS: tl.constexpr,
    ALL_OUTER: tl.constexpr,
):
    """What linear_short._load_slice loads, of one part; k runs along AXIS."""
    LENGTH: tl.constexpr = STEP << BIT
    FIRST: tl.constexpr = (STEPS >> (BIT + 1) << (BIT + 1)) * STEP * PARTS
    k = tl.expand_dims(FIRST + part * LENGTH + tl.arange(0, LENGTH), 1 - AXIS)
    return _load(address + k, tl.expand_dims(mask, AXIS), k < K, FIRST + PARTS * LENGTH <= K, ALL_OUTER)


@triton.jit
def _part(
    x_row,
    weight_row,
    row_mask,
    column_mask,
    part,
    OUT: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
):
    """Products over one part of K: (acc, acc of up), float32; the second is a zero without GATED."""
    STEPS: tl.constexpr = (K + PARTS * STEP - 1) // (PARTS * STEP)
    acc = tl.zeros((weight_row.shape[0], x_row.shape[1]), tl.float32)
    up = acc
    for bit in tl.static_range(7, -1, -1):
        if (STEPS >> bit) & 1:
            x = _slice(x_row, row_mask, part, K, PARTS, STEPS, bit, 0, False)  # noqa: FBT003 - ALL_OUTER
            weight = _slice(weight_row, column_mask, part, K, PARTS, STEPS, bit, 1, EVEN)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
            if GATED:
                weight = _slice(weight_row + OUT * K, column_mask, part, K, PARTS, STEPS, bit, 1, EVEN)
                up = tl.dot(weight, x, up, input_precision="ieee")
    return acc, up


@triton.jit(do_not_specialize=["num_rows"])
def parts_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    live_ptr,
    also_ptr,
    num_rows,
    x_stride,
    also_stride,
    OUT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    """One tile of the output."""
    num_rows = _counted(live_ptr, num_rows, PDL)
    if live_ptr is not None:  # noqa: SIM102 - the first is known to the compiler
        if _idle(num_rows, OUT, BLOCK_OUT, BLOCK_ROWS):
            return
    tile, block = _place(num_rows, OUT, BLOCK_OUT, BLOCK_ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    _begin(weight_ptr, column, 0, OUT, K, GATED, PREFETCH, PDL)
    x_row = x_ptr + row.to(tl.int64)[None, :] * x_stride
    weight_row = weight_ptr + column[:, None] * K
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    up_total = total
    for part in range(PARTS):
        acc, up = _part(
            x_row, weight_row, row < num_rows, column < OUT, part, OUT, K, PARTS, OUT % BLOCK_OUT == 0, GATED
        )
        if ORDERED:
            # The compiler would start a part's only product from the total, which rounds otherwise.
            acc = _moved(acc, 1)
            if GATED:
                up = _moved(up, 1)
        total += acc
        if GATED:
            up_total += up
    let_in(PDL, LATE)
    if GATED:
        total = total / (1 + tl.exp(-total)) * up_total
    _finish(total, row, column, num_rows, bias_ptr, residual_ptr, out_ptr, also_ptr, also_stride, OUT)
