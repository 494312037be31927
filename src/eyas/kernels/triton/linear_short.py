"""Products of a small model: latency is their cost, so all that a program reads is asked for at once.

A program holds the whole K of its weights and of 8 or 16 rows in registers. K is cut into PARTS, one for
every warp: the chain of multiply-adds, each of which waits for the one before, is PARTS times shorter.

A row's bits: 16-wide tensor core steps in ascending k within a part, then the parts in order; squares for
the norm as a tree. All of it is spelt out: a sum that the compiler orders depends on the tile, and many rows
take other tiles and other kernels (linear_parts.py, norm.py).

Legend: K in, OUT out (of one half if GATED), P parts (of K), O outputs of a tile, R rows of a block.
"""

# ruff: noqa: ANN001, ANN202, RUF005 - bodies and arguments are Triton's, not Python's
import triton
import triton.language as tl

from eyas.kernels.triton.norm import pair_sum
from eyas.kernels.triton.pdl import EARLY, LATE, let_in, wait

STEP = tl.constexpr(16)
"""Depth of a tensor core instruction in 16-bit types."""


@triton.jit
def _load(base, outer, outer_mask, stride, K: tl.constexpr, PARTS: tl.constexpr):
    """Rows [N] of a matrix as a tuple of slices [P, N, length], longest first.

    The lengths are the binary digits of a part's number of steps; in a slice the parts stand side by side.
    Example: K 576 in 4 parts: 9 steps, slices of 8 and of 1 step; part 1 has k of 128-255 and 528-543.
    """
    STEPS: tl.constexpr = (K + PARTS * STEP - 1) // (PARTS * STEP)
    slices = ()
    for bit in tl.static_range(7, -1, -1):
        if (STEPS >> bit) & 1:
            slices = slices + (_load_slice(base, outer, outer_mask, stride, K, PARTS, STEPS, bit),)  # type: ignore[assignment]
    return slices


@triton.jit
def _load_slice(
    base,
    outer,
    outer_mask,
    stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BIT: tl.constexpr,
):
    """The slice of binary digit BIT of STEPS; zeros past K."""
    LENGTH: tl.constexpr = STEP << BIT
    FIRST: tl.constexpr = (STEPS >> (BIT + 1) << (BIT + 1)) * STEP * PARTS
    part = tl.arange(0, PARTS)[:, None, None] * LENGTH
    k = FIRST + part + tl.arange(0, LENGTH)[None, None, :]
    mask = outer_mask[None, :, None]
    if FIRST + PARTS * LENGTH > K:
        mask = mask & (k < K)
    return tl.load(base + outer[None, :, None] * stride + k, mask=mask, other=0.0)


@triton.jit
def _moved(x, PACK: tl.constexpr):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@triton.jit
def _held(slices):
    """The same, to the compiler something new: what it does with it may not be moved before later loads."""
    held = ()
    for i in tl.static_range(len(slices)):
        held = held + (_moved(slices[i], 32 // slices[i].dtype.primitive_bitwidth),)
    return held


@triton.jit
def _normed(slices, scales, eps, K: tl.constexpr):
    """Slices [P, R, length] of rows, divided by their root mean square, times scales [P, 1, length]."""
    # As rms_norm adds them: a slice is the left half of a tree, the shorter slices are in the right half.
    total = _squares(slices[len(slices) - 1])
    for i in tl.static_range(len(slices) - 2, -1, -1):
        total = _squares(slices[i]) + total
    factor = tl.rsqrt(total * (1.0 / K) + eps)[None, :, None]
    normed = ()
    for i in tl.static_range(len(slices)):
        x = slices[i]
        # Rounded before the weight, as the reference does.
        unit = (x.to(tl.float32) * factor).to(x.dtype).to(tl.float32)
        normed = normed + ((unit * scales[i].to(tl.float32)).to(x.dtype),)  # type: ignore[assignment]
    return normed


@triton.jit
def _squares(x):
    """Sums of squares of a slice [P, R, length] -> [R], as a tree."""
    wide = x.to(tl.float32)
    by_part = pair_sum(tl.reshape(wide * wide, (x.shape[0] * x.shape[1], x.shape[2])))
    return pair_sum(tl.trans(tl.reshape(by_part, (x.shape[0], x.shape[1]))))


@triton.jit
def _in_turn(acc):
    """Sum of [P, O, R] along P: ((0 + 1) + 2) + 3."""
    pieces = (tl.permute(acc, (1, 2, 0)),)
    for _ in tl.static_range(6):
        if pieces[0].shape[2] > 1:
            pieces = _halves(pieces)
    total = pieces[0]
    for i in tl.static_range(1, len(pieces)):
        total += pieces[i]
    return tl.reshape(total, (acc.shape[1], acc.shape[2]))


@triton.jit
def _halves(pieces):
    """Every [O, R, N] as two [O, R, N / 2]."""
    halves = ()
    for i in tl.static_range(len(pieces)):
        x = pieces[i]
        pairs = tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        halves = halves + (first, second)  # type: ignore[assignment]
    return halves


@triton.jit
def _product(weights, rows):
    """Slices [P, O, length] and [P, R, length] -> [O, R] float32."""
    acc = tl.zeros((weights[0].shape[0], weights[0].shape[1], rows[0].shape[1]), tl.float32)
    for i in tl.static_range(len(weights)):
        acc = tl.dot(weights[i], tl.permute(rows[i], (0, 2, 1)), acc, input_precision="ieee")
    return _in_turn(acc)


@triton.jit(do_not_specialize=["num_rows"])
def short_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    also_ptr,
    num_rows,
    x_stride,
    also_stride,
    eps,
    OUT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One tile of the output."""
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row64 = row.to(tl.int64)
    let_in(PDL, EARLY)
    # What does not depend on the kernel before this one comes first.
    weights = _load(weight_ptr, column, column < OUT, K, K, PARTS)
    if GATED:
        up_weights = _load(weight_ptr + OUT * K, column, column < OUT, K, K, PARTS)
    if norm_ptr is not None:
        scales = _load(norm_ptr, tl.arange(0, 1), tl.arange(0, 1) < 1, K, K, PARTS)
    wait(PDL)
    x = _load(x_ptr, row64, row < num_rows, x_stride, K, PARTS)
    place = row64[None, :] * OUT + column[:, None]
    mask = (row[None, :] < num_rows) & (column[:, None] < OUT)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=mask, other=0.0)
    if ORDERED:
        tl.debug_barrier()
        weights, x = _held(weights), _held(x)
        if norm_ptr is not None:
            scales = _held(scales)
        if GATED:
            up_weights = _held(up_weights)
    if norm_ptr is not None:
        x = _normed(x, scales, eps, K)
    acc = _product(weights, x)
    if GATED:
        acc = acc / (1 + tl.exp(-acc)) * _product(up_weights, x)
    let_in(PDL, LATE)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
    if residual_ptr is not None:
        acc += residual.to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
    if also_ptr is not None:
        also = also_ptr + row64[None, :] * also_stride + column[:, None]
        tl.store(also, acc.to(out_ptr.dtype.element_ty), mask=mask)
