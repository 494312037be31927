"""The kernels of linear.py: one main loop, three endings.

The weight tile is the left (M) operand of the tensor cores and the activations the right (N) one: a tile of
64 weights fills M, which the hardware wants 64 wide, and N may be as small as the batch.

A row's bits do not depend on the other rows: every output element is one chain of additions in ascending k,
one chain per K-split, and the splits are added in order. Which other rows share its tile, how many tiles
there are, and whether the splits ran side by side or one after another changes nothing of that.

Legend: K in, OUT out (of one half if GATED), program (tile of BLOCK_OUT outputs, block of BLOCK_ROWS rows).
"""

# ruff: noqa: ANN001, ANN202 - bodies and arguments are Triton's, not Python's
import triton
import triton.language as tl

from eyas.kernels.triton.pdl import EARLY, LATE, let_in, wait

GROUP = tl.constexpr(8)
"""Row blocks that pass a weight tile one after another: their activations stay in L2."""
LINE = tl.constexpr(64)
"""16-bit weights of a 128-byte cache line."""
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def _place(num_rows, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """(tile, row block) of this program: up to GROUP row blocks first, then tiles, then further groups."""
    num_tiles = tl.cdiv(OUT, BLOCK_OUT)
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    program = tl.program_id(0)
    group = program // (GROUP * num_tiles)
    within = program % (GROUP * num_tiles)
    size = min(num_blocks - group * GROUP, GROUP)
    return within // size, group * GROUP + within % size


@triton.jit
def _counted(live_ptr, num_rows, PDL: tl.constexpr):
    """Rows to compute: those that the kernels before have counted, where they have."""
    if live_ptr is not None:
        let_in(PDL, EARLY)
        wait(PDL)
        num_rows = tl.minimum(num_rows, tl.load(live_ptr))
    return num_rows


@triton.jit
def _idle(num_rows, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Whether all tiles of the rows that count are other programs'."""
    return tl.program_id(0) >= tl.cdiv(OUT, BLOCK_OUT) * tl.cdiv(num_rows, BLOCK_ROWS)


@triton.jit
def _prefetch(weight_ptr, column, OUT: tl.constexpr, K: tl.constexpr, first, LINES: tl.constexpr):
    """Ask for LINES cache lines of every weight row in L2, which every reader shares: always safe."""
    k = first + tl.arange(0, LINES) * LINE
    address = weight_ptr + tl.minimum(column, OUT - 1)[:, None] * K + tl.minimum(k, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _begin(
    weight_ptr, column, first, OUT: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Under programmatic dependent launch: let the next kernel in, ask for weights, wait."""
    let_in(PDL, EARLY)
    if PREFETCH > 0:
        _prefetch(weight_ptr, column, OUT, K, first, PREFETCH)
        if GATED:
            _prefetch(weight_ptr + OUT * K, column, OUT, K, first, PREFETCH)
    wait(PDL)


@triton.jit
def _segment(
    x_ptr,
    weight_ptr,
    first_row,
    first_column,
    num_rows,
    x_stride,
    first,
    LENGTH: tl.constexpr,
    EXACT: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Products over k in [first, first + LENGTH): (acc, acc of up), float32.

    Without GATED the second is a zero. EXACT: no segment runs past K. With TMA x_ptr
    and weight_ptr are descriptors, which give zeros past the edges.
    """
    acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    up = acc
    if TMA:
        for step in range(0, LENGTH, BLOCK_K):
            x = x_ptr.load([first_row, first + step]).T
            acc = tl.dot(weight_ptr.load([first_column, first + step]), x, acc, input_precision="ieee")
            if GATED:
                up_weight = weight_ptr.load([OUT + first_column, first + step])
                up = tl.dot(up_weight, x, up, input_precision="ieee")
    else:
        row = first_row + tl.arange(0, BLOCK_ROWS)
        column = first_column + tl.arange(0, BLOCK_OUT)
        x_row = x_ptr + row.to(tl.int64)[None, :] * x_stride
        weight_row = weight_ptr + column[:, None] * K
        for step in range(0, LENGTH, BLOCK_K):
            k = first + step + tl.arange(0, BLOCK_K)
            x = _load(x_row + k[:, None], row[None, :] < num_rows, k[:, None] < K, EXACT, False)  # noqa: FBT003 - ALL_OUTER
            # Masks that are always true are left out: they would cost registers in every step.
            weight = _load(
                weight_row + k[None, :], column[:, None] < OUT, k[None, :] < K, EXACT, OUT % BLOCK_OUT == 0
            )
            acc = tl.dot(weight, x, acc, input_precision="ieee")
            if GATED:
                address = weight_row + OUT * K + k[None, :]
                up_weight = _load(address, column[:, None] < OUT, k[None, :] < K, EXACT, OUT % BLOCK_OUT == 0)
                up = tl.dot(up_weight, x, up, input_precision="ieee")
    return acc, up


@triton.jit
def _load(address, outer, inner, ALL_INNER: tl.constexpr, ALL_OUTER: tl.constexpr):
    """Load where outer and inner hold, zeros elsewhere; ALL_*: that one is true everywhere."""
    if ALL_INNER and ALL_OUTER:
        return tl.load(address)
    elif ALL_INNER:  # noqa: RET505 - Triton follows one branch of a static if, not what comes after it
        return tl.load(address, mask=outer, other=0.0)
    else:
        return tl.load(address, mask=outer & inner, other=0.0)


@triton.jit
def _finish(
    acc,
    row,
    column,
    num_rows,
    bias_ptr,
    residual_ptr,
    out_ptr,
    also_ptr,
    also_stride,
    OUT: tl.constexpr,
):
    """Add bias and residual to acc [BLOCK_OUT, BLOCK_ROWS], round once, store (twice if `also` is there)."""
    place = row.to(tl.int64)[None, :] * OUT + column[:, None]
    mask = (row[None, :] < num_rows) & (column[:, None] < OUT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
    if also_ptr is not None:
        also = also_ptr + row.to(tl.int64)[None, :] * also_stride + column[:, None]
        tl.store(also, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    live_ptr,
    also_ptr,
    num_rows,
    x_stride,
    also_stride,
    OUT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,
    PARALLEL: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    """One tile of the output; with PARALLEL one K-split of it, and the last to arrive adds them in order.

    With PARALLEL and no arrivals to count the splits are not added: partial is [SPLITS, rows, OUT].
    """
    EXACT: tl.constexpr = SPLITS * LENGTH == K
    rows_of_part = num_rows
    num_rows = _counted(live_ptr, num_rows, PDL)
    if live_ptr is not None:  # noqa: SIM102 - the first is known to the compiler
        if _idle(num_rows, OUT, BLOCK_OUT, BLOCK_ROWS):
            return
    tile, block = _place(num_rows, OUT, BLOCK_OUT, BLOCK_ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    first = split * LENGTH
    _begin(weight_ptr, column, first, OUT, K, GATED, PREFETCH, PDL)
    acc, up = _segment(
        x_ptr, weight_ptr, block * BLOCK_ROWS, tile * BLOCK_OUT, num_rows, x_stride, first,
        LENGTH, EXACT, OUT, K, BLOCK_OUT, BLOCK_ROWS, BLOCK_K, GATED, TMA,
    )  # fmt: skip
    if not PARALLEL:
        for later in tl.static_range(1, SPLITS):
            part, _ = _segment(
                x_ptr, weight_ptr, block * BLOCK_ROWS, tile * BLOCK_OUT, num_rows, x_stride,
                later * LENGTH, LENGTH, EXACT, OUT, K, BLOCK_OUT, BLOCK_ROWS, BLOCK_K, GATED, TMA,
            )  # fmt: skip
            acc += part
    let_in(PDL, LATE)
    if GATED:
        acc = acc / (1 + tl.exp(-acc)) * up
    if PARALLEL and arrived_ptr is None:
        part_ptr = partial_ptr + split.to(tl.int64) * rows_of_part * OUT
        _finish(acc, row, column, num_rows, None, None, part_ptr, None, None, OUT)
    elif PARALLEL:
        SIZE: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        inside = tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        parts = partial_ptr + program.to(tl.int64) * SIZE + inside
        tl.store(parts + split.to(tl.int64) * num_programs * SIZE, acc)
        # All threads' stores come before the one thread's atomic, and its acquire before all their loads.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + program, 0)
            total = tl.load(parts, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(parts + other * num_programs.to(tl.int64) * SIZE, cache_modifier=".cg")
            _finish(total, row, column, num_rows, bias_ptr, residual_ptr, out_ptr, also_ptr, also_stride, OUT)
    else:
        _finish(acc, row, column, num_rows, bias_ptr, residual_ptr, out_ptr, also_ptr, also_stride, OUT)


@triton.jit
def _largest(value, index, mask, AXIS: tl.constexpr):
    """Along AXIS: the largest value, NaN if there is one, and the lowest index that has it."""
    broken = (value != value) & mask  # noqa: PLR0124 - NaN
    largest = tl.max(tl.where(mask & ~broken, value, float("-inf")), axis=AXIS)
    any_broken = tl.max(broken.to(tl.int32), axis=AXIS) > 0
    if AXIS == 0:
        hit = tl.where(any_broken[None, :], broken, (value == largest[None, :]) & mask)
    else:
        hit = tl.where(any_broken[:, None], broken, (value == largest[:, None]) & mask)
    first = tl.min(tl.where(hit, index, NO_INDEX), axis=AXIS)
    return tl.where(any_broken, float("nan"), largest), first


@triton.jit(do_not_specialize=["num_rows"])
def max_kernel(
    x_ptr,
    weight_ptr,
    value_ptr,
    index_ptr,
    num_rows,
    x_stride,
    OUT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    """Largest logit of every row within one tile of the vocabulary: value and index [rows, tiles]."""
    tile, block = _place(num_rows, OUT, BLOCK_OUT, BLOCK_ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    _begin(weight_ptr, column, 0, OUT, K, False, PREFETCH, PDL)  # noqa: FBT003 - GATED
    acc, _ = _segment(
        x_ptr, weight_ptr, block * BLOCK_ROWS, tile * BLOCK_OUT, num_rows, x_stride, 0,
        tl.cdiv(K, BLOCK_K) * BLOCK_K, K % BLOCK_K == 0, OUT, K, BLOCK_OUT, BLOCK_ROWS, BLOCK_K,
        False, TMA,  # noqa: FBT003 - GATED
    )  # fmt: skip
    let_in(PDL, LATE)
    # Rounded as `linear` stores them, so that ties are the same ones.
    logits = acc.to(value_ptr.dtype.element_ty).to(tl.float32)
    value, index = _largest(logits, column[:, None], column[:, None] < OUT, 0)
    place = row * tl.cdiv(OUT, BLOCK_OUT) + tile
    tl.store(value_ptr + place, value.to(value_ptr.dtype.element_ty), mask=row < num_rows)
    tl.store(index_ptr + place, index, mask=row < num_rows)


@triton.jit
def max_of_tiles_kernel(
    value_ptr,
    index_ptr,
    map_ptr,
    largest_ptr,
    id_ptr,
    num_tiles,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row: the largest of its tiles, and its id."""
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)[None, :]
    mask = tile < num_tiles
    let_in(PDL, EARLY)
    wait(PDL)
    value = tl.load(value_ptr + row * num_tiles + tile, mask=mask, other=0.0).to(tl.float32)
    index = tl.load(index_ptr + row * num_tiles + tile, mask=mask, other=0)
    largest, first = _largest(value, index, mask, 1)
    if map_ptr is not None:  # noqa: SIM108 - not Triton's
        chosen = tl.load(map_ptr + first)
    else:
        chosen = first.to(tl.int64)
    let_in(PDL, LATE)
    place = row + tl.arange(0, 1)
    tl.store(largest_ptr + place, largest.to(largest_ptr.dtype.element_ty))
    tl.store(id_ptr + place, chosen)
