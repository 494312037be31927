"""The kernels of paged_attention.py; the idea is told there.

Legend: M pairs (row, head of the KV head's group) of a tile, N keys of a unit, D head width, R rows,
STATE keys of a stored state (a unit or a chunk). The left side of the products is what the hardware wants 64
high: keys, then head width, and sums are [D, M]. Pairs are the right side, which may be narrow.
"""
# ruff: noqa: ANN001, ANN201, ANN202 - arguments get their types at the launch

import triton
import triton.language as tl

from eyas.kernels.triton.paged_attention_loads import (
    ask_for,
    ask_state,
    cache_rows,
    keys_and_values,
    own_rows,
    pages,
    queries,
    write,
)
from eyas.kernels.triton.pdl import EARLY, LATE, let_in, wait

NONE = tl.constexpr(-1e30)
"""Peak of no keys at all: finite, so that no difference of peaks is NaN."""

# What a program asks L2 for: nothing, its first unit, its first state before the kernel before ends.
NOTHING, UNIT, BEFORE = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _popcount(bits):
    """Number of ones of non-negative int64, by adding neighbours: pairs, nibbles, bytes, ..."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 127).to(tl.int32)


@triton.jit
def _requests_rows(q_start_ptr, request, max_rows, UNIFORM: tl.constexpr):
    """(first row, number of rows) of a request; known without a load where all have as many."""
    if UNIFORM:
        begin = request * max_rows
        rows = max_rows
    else:
        begin = tl.load(q_start_ptr + request)
        rows = tl.load(q_start_ptr + request + 1) - begin
    return begin, rows


@triton.jit
def _sight(
    visible_ptr, tree_bits_ptr, begin, rows, pair, num_keys, window, GROUP: tl.constexpr,
    STATE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """What the pairs [M] of a tile see.

    Returns (live [M], visible [M], tree bits [M], window's base [M], last key, first state, end of states):
    keys from the first state's on to `last` are seen by some pair.
    """
    row = pair // GROUP
    live = row < rows
    visible = tl.load(visible_ptr + begin + row, mask=live, other=0)
    bits = visible.to(tl.int64)
    sees = visible > 0
    low = visible
    last = tl.max(visible)
    first = 0
    if HAS_TREE:
        bits = tl.load(tree_bits_ptr + begin + row, mask=live, other=0)
        sees |= bits > 0
        # All bits up to the highest one that any row has: their number is how far past `visible` rows see.
        smeared = tl.max(bits)
        smeared |= smeared >> 1
        smeared |= smeared >> 2
        smeared |= smeared >> 4
        smeared |= smeared >> 8
        smeared |= smeared >> 16
        smeared |= smeared >> 32
        last += _popcount(smeared)
        if HAS_WINDOW:
            low = visible + _popcount(bits)
    last = tl.minimum(last, num_keys)
    if HAS_WINDOW:
        lowest = tl.min(tl.where(sees, visible, 2147483647))
        first = tl.minimum(tl.maximum(lowest - window, 0), last) // STATE
    return live, visible, bits, low, last, first, (last + STATE - 1) // STATE


@triton.jit
def _shrink(less, more):
    """2^(less - more) of whole numbers less <= more, made from bits: exactly a power of two, or 0.

    Added to 1.5 * 2^23, a whole number stands in the low bits: conversions are slow.
    """
    exponent = (tl.maximum(less - more, -127.0) + 12582912.0).to(tl.int32, bitcast=True)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fold(peak, total, acc, more_peak, more_total, more_acc):
    """Softmax state (peak [M], total [M], acc [D, M]) of two sets of keys.

    Factors are powers of two, so only the sum itself rounds.
    """
    top = tl.maximum(peak, more_peak)
    shrink = _shrink(peak, top)
    more_shrink = _shrink(more_peak, top)
    total = tl.fma(more_total, more_shrink, total * shrink)
    acc = tl.fma(more_acc, more_shrink[None, :], acc * shrink[None, :])
    return top, total, acc


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """State of no keys."""
    peak = tl.full([BLOCK_M], NONE, tl.float32)
    return peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_D, BLOCK_M], tl.float32)


@triton.jit
def _store_out(
    out_ptr, sinks_ptr, token, head, live, peak, total, acc, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of weights, a sink's included, and write the tile."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(peak, tl.ceil(sink))
        shrink = _shrink(peak, top)
        total = tl.fma(total, shrink, tl.exp2(sink - top))
        acc = acc * shrink[None, :]
    out = acc / tl.where(total > 0, total, 1.0)[None, :]
    d = tl.arange(0, BLOCK_D)
    row = ((token * NUM_HEADS + head) * HEAD_DIM)[None, :]
    tl.store(
        out_ptr + row + d[:, None],
        out.to(out_ptr.dtype.element_ty),
        mask=live[None, :] & (d < HEAD_DIM)[:, None],
    )


@triton.jit
def _fold_batch(
    top, total, acc, acc_ptr, peak_ptr, total_ptr, batch, pair, place, first, end, max_states, kept_pairs,
    BLOCK_D: tl.constexpr, PER_CHUNK: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Fold BATCH stored states of a pair into (top, total, acc [D]): PER_CHUNK are summed, then join the sum.

    BATCH is a multiple of PER_CHUNK. All loads come before their first use, masked by what is known without
    one. A pair's peak and total are numbers, not tensors of one: a tensor is worked out once for every
    layout that it is used in.
    """
    begin = place * max_states * kept_pairs + pair
    acc_ptr += begin * BLOCK_D + tl.arange(0, BLOCK_D)
    peak_ptr += begin
    total_ptr += begin
    peaks = ()
    totals = ()
    accs = ()
    for i in tl.static_range(BATCH):
        state = batch * BATCH + i
        # Within a tile 32 bits do.
        at = state * kept_pairs
        stored = state < max_states
        # .cg: from the cache that all programs share.
        peaks += (tl.load(peak_ptr + at, mask=stored, cache_modifier=".cg"),)  # type: ignore[assignment]
        totals += (tl.load(total_ptr + at, mask=stored, cache_modifier=".cg"),)  # type: ignore[assignment]
        accs += (tl.load(acc_ptr + at * BLOCK_D, mask=stored, cache_modifier=".cg"),)  # type: ignore[assignment]
    before = top
    for i in tl.static_range(BATCH):
        state = batch * BATCH + i
        top = tl.maximum(top, tl.where((state < end) & (state >= first), peaks[i], NONE))
    shrink = _shrink(before, top)
    total *= shrink
    acc *= shrink
    for i in tl.static_range(BATCH):
        state = batch * BATCH + i
        there = (state < end) & (state >= first)
        # Memory of states that nobody has stored may hold anything.
        more_total = tl.where(there, totals[i], 0.0)
        more = tl.where(there, accs[i], 0.0)
        factor = _shrink(tl.where(there, peaks[i], NONE), top)
        if i % PER_CHUNK == 0:
            part_total = more_total * factor
            part = more * factor
        else:
            part_total = tl.fma(more_total, factor, part_total)
            part = tl.fma(more, factor, part)
        if (i + 1) % PER_CHUNK == 0:
            total += part_total
            acc += part
    return top, total, acc


@triton.jit
def _fold_stored(
    out_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, begin, kv_head, tile, pair, place, first, end,
    max_states, kept_pairs, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PER_CHUNK: tl.constexpr, BATCH: tl.constexpr,
    HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the stored states [first, end) of a live pair of a tile and write its row, if they are several.

    `place` int64 numbers the tiles; pair m of it and state s are at (place * max_states + s) * kept + m.
    PER_CHUNK states are summed in order, and so are the sums: as one program that walks all keys does it.
    One pair, so that no thread has to wait for another one.
    """
    # A single state isn't stored: the tile's result is written already.
    end = tl.where(end - first > 1, end, first)
    # The first batch is asked for while the limits are still on their way.
    top, total, acc = _fold_batch(
        NONE, 0.0, tl.zeros([BLOCK_D], tl.float32), acc_ptr, peak_ptr, total_ptr, first // BATCH, pair, place,
        first, end, max_states, kept_pairs, BLOCK_D, PER_CHUNK, BATCH,
    )  # fmt: skip
    for batch in range(first // BATCH + 1, (end + BATCH - 1) // BATCH):
        top, total, acc = _fold_batch(
            top, total, acc, acc_ptr, peak_ptr, total_ptr, batch, pair, place, first, end, max_states,
            kept_pairs, BLOCK_D, PER_CHUNK, BATCH,
        )  # fmt: skip
    let_in(PDL, LATE)
    nought = tl.zeros([1], tl.float32)
    pair = tile * BLOCK_M + pair + tl.arange(0, 1)
    _store_out(
        out_ptr, sinks_ptr, (begin + pair // GROUP).to(tl.int64), kv_head * GROUP + pair % GROUP,
        tl.arange(0, 1) < end - first, nought + top, nought + total, acc[:, None], NUM_HEADS, HEAD_DIM,
        BLOCK_D, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def _unit(
    query, key, value, start, visible, bits, low, last, least, scale, window, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The state (peak, total, acc) of the keys [start, start + N).

    The peak is a whole number, so that folding multiplies by powers of two. `least` [M] is the lowest that it
    may be: of pairs that see nothing, too high for any weight.
    """
    scores = _dot(key, tl.trans(query), EXACT)
    key_index = (start + tl.arange(0, BLOCK_N))[:, None]
    allowed = key_index < visible[None, :]
    if HAS_WINDOW:
        allowed &= key_index >= (low - window)[None, :]
    if HAS_TREE:
        own = key_index - visible[None, :]
        bit = (bits[None, :] >> tl.minimum(tl.maximum(own, 0), 62).to(tl.int64)) & 1
        allowed |= (own >= 0) & (own < 63) & (bit == 1) & (key_index < last)
    scores = tl.where(allowed, scores, float("-inf"))
    peak = tl.maximum(tl.ceil(tl.max(scores, 0) * scale), least)
    weights = tl.exp2(tl.fma(scores, scale, -peak[None, :]))
    total = tl.sum(weights, 0)
    acc = _dot(tl.trans(value), weights.to(value.dtype), EXACT)
    return peak, total, acc


@triton.jit
def _dot(left, right, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(left, right, input_precision="ieee")
    else:  # noqa: RET505 - Triton follows one branch of a static if
        return tl.dot(left, right)


@triton.jit
def _store_state(
    acc_ptr, peak_ptr, total_ptr, at, live, several, peak, total, acc, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Store a state for the fold; a tile's only state is the whole and stays where it is.

    DIRECT: every thread writes what it holds. `tl.store` would exchange it through shared memory first, for
    which there is no room while keys come in.
    """
    if several:
        pair = at + tl.arange(0, BLOCK_M)
        where = (pair * BLOCK_D)[None, :] + tl.arange(0, BLOCK_D)[:, None]
        if DIRECT:
            write(peak_ptr + pair, peak, live)
            write(total_ptr + pair, total, live)
            write(acc_ptr + where, acc, live[None, :])
        else:
            tl.store(peak_ptr + pair, peak, mask=live)
            tl.store(total_ptr + pair, total, mask=live)
            tl.store(acc_ptr + where, acc, mask=live[None, :])


# Whether these are multiples of 16 changes nothing, and shall not cost a compilation.
_VARIED = ["page_stride", "num_pages", "num_cache_pages", "window", "max_rows", "splits"]
_VARIED_STATES = ["max_states", "kept_pairs"]


@triton.jit(do_not_specialize=_VARIED + _VARIED_STATES)
def attention_kernel(
    query_ptr, key_cache_ptr, value_cache_ptr, out_ptr, page_table_ptr, q_start_ptr, visible_ptr,
    tree_bits_ptr, sinks_ptr, slots_ptr, cos_ptr, sin_ptr, acc_ptr, peak_ptr, total_ptr,
    scale, query_stride, page_stride, num_pages, num_cache_pages, window, max_rows, splits, max_states,
    kept_pairs, PAGE_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr, HAS_SINKS: tl.constexpr, UNIFORM: tl.constexpr, ROTATE: tl.constexpr,
    SPLIT: tl.constexpr, DIRECT: tl.constexpr, EXACT: tl.constexpr, ASK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a KV head, a tile of a request's pairs, and its states split, split + splits, ...

    Loads that don't need each other are asked for side by side: a program of few keys costs two waits for
    memory, one for pages, limits, queries and new rows, one for keys and values.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    request = tl.program_id(2)
    pages_ptr = page_table_ptr + request.to(tl.int64) * page_stride
    num_keys = num_pages * PAGE_SIZE
    let_in(PDL, EARLY)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    if ASK == BEFORE:
        begin, rows = _requests_rows(q_start_ptr, request, max_rows, UNIFORM)
        ask_state(
            key_cache_ptr, value_cache_ptr, pages_ptr, visible_ptr + begin, kv_head, split * STATE, num_keys,
            num_cache_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, STATE,
        )  # fmt: skip
    wait(PDL)
    begin, rows = _requests_rows(q_start_ptr, request, max_rows, UNIFORM)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = (begin + pair // GROUP).to(tl.int64)
    if SPLIT and not HAS_WINDOW:
        # Asked for beside the limits; masked by what is certain.
        page = pages(pages_ptr, split * STATE, num_keys, PAGE_SIZE, BLOCK_N)
    if ROTATE:
        own = tl.arange(0, BLOCK_R)
        own_token = (begin + own).to(tl.int64)
        own_slot = tl.load(slots_ptr + own_token, mask=own < rows, other=-1)
        own_visible = tl.load(visible_ptr + own_token, mask=own < rows, other=2147483647)
        own_key, own_value = own_rows(
            query_ptr, cos_ptr, sin_ptr, own_token, own < rows, kv_head, query_stride, NUM_HEADS,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    head = kv_head * GROUP + pair % GROUP
    query = queries(
        query_ptr, cos_ptr, sin_ptr, begin, rows, tile * BLOCK_M, kv_head, query_stride, GROUP, HEAD_DIM,
        BLOCK_M, BLOCK_Q, BLOCK_D, ROTATE,
    )  # fmt: skip
    if ASK == UNIT and SPLIT and not HAS_WINDOW:
        # On their way while queries are rotated and rows are cached.
        ask_for(
            key_cache_ptr, value_cache_ptr, page, kv_head, split * STATE, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_N,
        )  # fmt: skip
    live, visible, bits, low, last, first, end = _sight(
        visible_ptr, tree_bits_ptr, begin, rows, pair, num_keys, window, GROUP, STATE, HAS_WINDOW, HAS_TREE,
    )  # fmt: skip
    workers = tl.maximum(tl.minimum(splits, end - first), 1)
    if (split >= workers) | (tile * BLOCK_M >= rows * GROUP):
        return
    at = (first + split) * STATE
    if not (SPLIT and not HAS_WINDOW):
        page = pages(pages_ptr, at, last, PAGE_SIZE, BLOCK_N)
    if ROTATE:
        lowest_own = tl.min(tl.where(own_slot >= 0, own_visible, 2147483647))
        newest = first + split + tl.maximum(end - first - 1 - split, 0) // splits * splits
        # A row's KV index is visible - 1, or visible and more in a tree.
        if (newest + 1) * STATE >= lowest_own:
            cache_rows(
                key_cache_ptr, value_cache_ptr, own_slot, kv_head, own_key, own_value, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_D,
            )  # fmt: skip
    least = tl.where((visible == 0) & live, -NONE, NONE)
    if HAS_TREE:
        least = tl.full([BLOCK_M], NONE, tl.float32)
    peak, total, acc = _nothing(BLOCK_M, BLOCK_D)
    if SPLIT:
        place = ((request * (tl.num_programs(1) // splits) + tile) * NUM_KV_HEADS + kv_head).to(tl.int64)
        # One loop over the units of all of this program's states, so that the keys of the next state are on
        # their way while one is stored.
        EACH: tl.constexpr = STATE // BLOCK_N
        states = (end - first - split + splits - 1) // splits
        units = states * EACH
        if first + split + (states - 1) * splits == end - 1:
            units -= (end * STATE - last) // BLOCK_N
        for unit in range(units):
            state = first + split + unit // EACH * splits
            start = state * STATE + unit % EACH * BLOCK_N
            key, value = keys_and_values(
                key_cache_ptr, value_cache_ptr, page, kv_head, start, last, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_N, BLOCK_D,
            )  # fmt: skip
            # Of the next unit: of this program's next state after the last one of this.
            ends = unit % EACH == EACH - 1
            skip = tl.where(ends, (splits - 1) * STATE, 0)
            page = pages(pages_ptr, start + BLOCK_N + skip, last, PAGE_SIZE, BLOCK_N)
            more_peak, more_total, more = _unit(
                query, key, value, start, visible, bits, low, last, least, scale, window, BLOCK_N, HAS_WINDOW,
                HAS_TREE, EXACT,
            )  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, more_peak, more_total, more)
            if ends | (unit == units - 1):
                _store_state(
                    acc_ptr, peak_ptr, total_ptr, (place * max_states + state) * kept_pairs, live,
                    end - first > 1, peak, total, acc, BLOCK_M, BLOCK_D, DIRECT,
                )  # fmt: skip
                if unit < units - 1:
                    peak, total, acc = _nothing(BLOCK_M, BLOCK_D)
    else:
        whole_peak, whole_total, whole = peak, total, acc
        for start in range(at, last, BLOCK_N):
            key, value = keys_and_values(
                key_cache_ptr, value_cache_ptr, page, kv_head, start, last, PAGE_SIZE, NUM_KV_HEADS,
                HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            page = pages(pages_ptr, start + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
            more_peak, more_total, more = _unit(
                query, key, value, start, visible, bits, low, last, least, scale, window, BLOCK_N,
                HAS_WINDOW, HAS_TREE, EXACT,
            )  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, more_peak, more_total, more)
            if (start + BLOCK_N) % CHUNK == 0:
                whole_peak, whole_total, whole = _fold(whole_peak, whole_total, whole, peak, total, acc)
                peak, total, acc = _nothing(BLOCK_M, BLOCK_D)
        peak, total, acc = _fold(whole_peak, whole_total, whole, peak, total, acc)
    let_in(PDL, LATE)
    if (not SPLIT) or end - first <= 1:
        _store_out(
            out_ptr, sinks_ptr, token, head, live, peak, total, acc, NUM_HEADS, HEAD_DIM, BLOCK_D, HAS_SINKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_keys", "window", "max_rows", *_VARIED_STATES])
def fold_kernel(
    out_ptr, q_start_ptr, visible_ptr, tree_bits_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, num_keys,
    window, max_rows, max_states, kept_pairs, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, STATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    HAS_SINKS: tl.constexpr, UNIFORM: tl.constexpr, BATCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second pass: a pair a program of one warp.

    Tiles of one state are written already.
    """
    let_in(PDL, EARLY)
    wait(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head, tile, request = tl.program_id(0), tl.program_id(1) // kept_pairs, tl.program_id(2)
    pair = tl.program_id(1) % kept_pairs
    begin, rows = _requests_rows(q_start_ptr, request, max_rows, UNIFORM)
    if tile * BLOCK_M + pair < rows * GROUP:
        _, _, _, _, _, first, end = _sight(
            visible_ptr, tree_bits_ptr, begin, rows, tile * BLOCK_M + tl.arange(0, BLOCK_M), num_keys, window,
            GROUP, STATE, HAS_WINDOW, HAS_TREE,
        )  # fmt: skip
        place = ((request * (tl.num_programs(1) // kept_pairs) + tile) * NUM_KV_HEADS + kv_head).to(tl.int64)
        _fold_stored(
            out_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, begin, kv_head, tile, pair, place, first, end,
            max_states, kept_pairs, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, CHUNK // STATE, BATCH,
            HAS_SINKS, PDL,
        )  # fmt: skip
