"""The kernels of linear.py: one main loop, three endings.

The weight tile is the left (M) operand of the tensor cores and the activations the right (N) one: a tile of
64 weights fills M, which the hardware wants 64 wide, and N may be as small as the batch.

A row's bits do not depend on the other rows: every output element is one chain of additions in ascending k,
one chain per K-split, and the splits are added in order. Which other rows share its tile, how many tiles
there are, and whether the splits ran side by side or one after another changes nothing of that. The sum of
squares of the norm has an order of its own that `norm_pass_kernel` repeats: `BLOCK_K` lanes, then a tree.

Legend: K in, OUT out (of one half if GATED), program (tile of BLOCK_OUT outputs, block of BLOCK_ROWS rows).
"""

# ruff: noqa: ANN001, ANN202 - bodies and arguments are Triton's, not Python's
import triton
import triton.language as tl

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
    weight_ptr, column, first, OUT: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, PREFETCH: tl.constexpr
) -> None:
    """Under programmatic dependent launch: let the next kernel in, fetch weights, wait for the one before."""
    tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0:
        _prefetch(weight_ptr, column, OUT, K, first, PREFETCH)
        if GATED:
            _prefetch(weight_ptr + OUT * K, column, OUT, K, first, PREFETCH)
    tl.extra.cuda.gdc_wait()


@triton.jit
def _ordered_sum(lanes, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Lanes [COUNT, ROWS] -> [ROWS] by a tree of neighbours, whatever layout the compiler chose."""
    LEVELS: tl.constexpr = COUNT.bit_length() - 1
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(lanes, (COUNT >> (level + 1), 2, ROWS))
        even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
        lanes = even + odd
    return tl.reshape(lanes, (ROWS,))


@triton.jit
def _rms_scale(squares, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of lanes [BLOCK_K, ROWS], float32 [ROWS]."""
    return tl.rsqrt(_ordered_sum(squares, BLOCK_K, ROWS) / K + eps)


@triton.jit
def _segment(
    x_ptr,
    weight_ptr,
    norm_ptr,
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
    NORM: tl.constexpr,
    TMA: tl.constexpr,
):
    """Products over k in [first, first + LENGTH): (acc, acc of up, lanes of squares), float32.

    Without GATED the second is a zero, without NORM the third. EXACT: no segment runs past K. With TMA x_ptr
    and weight_ptr are descriptors, which give zeros past the edges.
    """
    acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    up = acc
    squares = tl.zeros((BLOCK_K, BLOCK_ROWS), tl.float32)
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
            if NORM:
                wide = x.to(tl.float32)
                squares += wide * wide
                scale = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
                x = (wide * scale[:, None]).to(weight.dtype)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
            if GATED:
                address = weight_row + OUT * K + k[None, :]
                up_weight = _load(address, column[:, None] < OUT, k[None, :] < K, EXACT, OUT % BLOCK_OUT == 0)
                up = tl.dot(up_weight, x, up, input_precision="ieee")
    return acc, up, squares


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
    OUT: tl.constexpr,
):
    """Add bias and residual to acc [BLOCK_OUT, BLOCK_ROWS], round once, store."""
    place = row.to(tl.int64)[None, :] * OUT + column[:, None]
    mask = (row[None, :] < num_rows) & (column[:, None] < OUT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    scale_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    x_stride,
    eps,
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
    """One tile of the output; with PARALLEL one K-split of it, and the last to arrive adds them in order."""
    EXACT: tl.constexpr = SPLITS * LENGTH == K
    tile, block = _place(num_rows, OUT, BLOCK_OUT, BLOCK_ROWS)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    first = split * LENGTH
    if PDL:
        _begin(weight_ptr, column, first, OUT, K, GATED, PREFETCH)
    acc, up, squares = _segment(
        x_ptr, weight_ptr, norm_ptr, block * BLOCK_ROWS, tile * BLOCK_OUT, num_rows, x_stride, first,
        LENGTH, EXACT, OUT, K, BLOCK_OUT, BLOCK_ROWS, BLOCK_K, GATED, norm_ptr is not None, TMA,
    )  # fmt: skip
    if not PARALLEL:
        for later in tl.static_range(1, SPLITS):
            part, _, _ = _segment(
                x_ptr, weight_ptr, norm_ptr, block * BLOCK_ROWS, tile * BLOCK_OUT, num_rows, x_stride,
                later * LENGTH, LENGTH, EXACT, OUT, K, BLOCK_OUT, BLOCK_ROWS, BLOCK_K, GATED,
                norm_ptr is not None, TMA,
            )  # fmt: skip
            acc += part
    if norm_ptr is not None:
        scale = _rms_scale(squares, eps, K, BLOCK_K, BLOCK_ROWS)[None, :]
        acc *= scale
        up *= scale
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row, mask=row < num_rows, other=0.0)[None, :]
        if not PARALLEL:
            acc *= scale
            up *= scale
    if GATED:
        acc = acc / (1 + tl.exp(-acc)) * up
    if PARALLEL:
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
            if scale_ptr is not None:
                total *= scale
            _finish(total, row, column, num_rows, bias_ptr, residual_ptr, out_ptr, OUT)
    else:
        _finish(acc, row, column, num_rows, bias_ptr, residual_ptr, out_ptr, OUT)


@triton.jit
def norm_pass_kernel(
    x_ptr,
    norm_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row: x * norm weight, and the scale that the product's ending multiplies by."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros((BLOCK_K,), tl.float32)
    # Unrolled, and the stores apart from it, so that all loads are in flight at once.
    for step in tl.static_range(0, K, BLOCK_K):
        wide = tl.load(x_ptr + row * x_stride + step + lane, mask=step + lane < K, other=0.0).to(tl.float32)
        squares += wide * wide
    scale = _rms_scale(tl.reshape(squares, (BLOCK_K, 1)), eps, K, BLOCK_K, 1)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    for step in tl.static_range(0, K, BLOCK_K):
        mask = step + lane < K
        wide = tl.load(x_ptr + row * x_stride + step + lane, mask=mask, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + step + lane, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * K + step + lane, (wide * norm).to(out_ptr.dtype.element_ty), mask=mask)


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
    norm_ptr,
    scale_ptr,
    value_ptr,
    index_ptr,
    num_rows,
    x_stride,
    eps,
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
    if PDL:
        _begin(weight_ptr, column, 0, OUT, K, False, PREFETCH)  # noqa: FBT003 - GATED
    acc, _, squares = _segment(
        x_ptr, weight_ptr, norm_ptr, block * BLOCK_ROWS, tile * BLOCK_OUT, num_rows, x_stride, 0,
        tl.cdiv(K, BLOCK_K) * BLOCK_K, K % BLOCK_K == 0, OUT, K, BLOCK_OUT, BLOCK_ROWS, BLOCK_K,
        False, norm_ptr is not None, TMA,  # noqa: FBT003 - GATED
    )  # fmt: skip
    if norm_ptr is not None:
        acc *= _rms_scale(squares, eps, K, BLOCK_K, BLOCK_ROWS)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + row, mask=row < num_rows, other=0.0)[None, :]
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
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(value_ptr + row * num_tiles + tile, mask=mask, other=0.0).to(tl.float32)
    index = tl.load(index_ptr + row * num_tiles + tile, mask=mask, other=0)
    largest, first = _largest(value, index, mask, 1)
    if map_ptr is not None:  # noqa: SIM108 - not Triton's
        chosen = tl.load(map_ptr + first)
    else:
        chosen = first.to(tl.int64)
    place = row + tl.arange(0, 1)
    tl.store(largest_ptr + place, largest.to(largest_ptr.dtype.element_ty))
    tl.store(id_ptr + place, chosen)
