"""The kernels of paged_attention.py; the idea is told there.

Legend: M pairs (row, head of the KV head's group) of a tile, N keys of a tile, D head width, R rows.
"""
# ruff: noqa: ANN001, ANN201, ANN202, FBT003, SIM108 - arguments get their types at the launch

import triton
import triton.language as tl

from eyas.kernels.triton.rotary import rotated

PIECE = tl.constexpr(16)
"""Pairs that are folded together from memory; small, so that many loads are under way."""


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
def _tile(
    q_start_ptr, visible_ptr, tree_bits_ptr, request, tile, num_keys, window, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """What the pairs of a tile see.

    Returns (token int64 [M], pair [M], live [M], visible [M], tree bits [M], window's base [M], last, first
    chunk, number of chunks): keys from the first chunk's on to `last` are seen by some pair.
    """
    begin = tl.load(q_start_ptr + request)
    rows = tl.load(q_start_ptr + request + 1) - begin
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP
    live = row < rows
    visible = tl.load(visible_ptr + begin + row, mask=live, other=0)
    bits = visible.to(tl.int64)
    sees = visible > 0
    low = visible
    last = tl.max(visible)
    first_chunk = 0
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
        first_chunk = tl.minimum(tl.maximum(lowest - window, 0), last) // CHUNK
    num_chunks = (last + CHUNK - 1) // CHUNK - first_chunk
    return (begin + row).to(tl.int64), pair, live, visible, bits, low, last, first_chunk, num_chunks


@triton.jit
def _fold(peak, total, acc, more_peak, more_total, more_acc):
    """Softmax state of two sets of keys, in base 2. (-inf, 0, 0), a set of none, changes no bit."""
    top = tl.maximum(peak, more_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(peak - base)
    more_shrink = tl.exp2(more_peak - base)
    total = tl.fma(more_total, more_shrink, total * shrink)
    acc = tl.fma(more_acc, more_shrink[:, None], acc * shrink[:, None])
    return top, total, acc


@triton.jit
def _store_out(
    out_ptr, sinks_ptr, token, head, live, peak, total, acc, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of weights, a sink's included, and write the tile."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - top)
        total = tl.fma(total, shrink, tl.exp2(sink - top))
        acc = acc * shrink[:, None]
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    d = tl.arange(0, BLOCK_D)
    tl.store(
        out_ptr + (token[:, None] * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit
def _fold_stored(
    out_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, begin, rows, kv_head, tile, piece, place, num_chunks,
    max_chunks, kept_pairs, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Fold the stored states of one piece of a tile, chunk by chunk, and write its rows of the result.

    `place` int64 numbers the tiles; pair m of it and chunk c have state (place * max_chunks + c) * kept + m.
    """
    pair = piece * PIECE + tl.arange(0, PIECE)
    row = (tile * BLOCK_M + pair) // GROUP
    live = (pair < BLOCK_M) & (row < rows)
    d = tl.arange(0, BLOCK_D)
    peak = tl.full([PIECE], float("-inf"), tl.float32)
    total = tl.zeros([PIECE], tl.float32)
    acc = tl.zeros([PIECE, BLOCK_D], tl.float32)
    for chunk in tl.range(0, num_chunks, num_stages=4):
        at = (place * max_chunks + chunk) * kept_pairs + pair
        # .cg: from the cache that all programs share.
        more_peak = tl.load(peak_ptr + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        more_total = tl.load(total_ptr + at, mask=live, other=0.0, cache_modifier=".cg")
        where = at[:, None] * BLOCK_D + d[None, :]
        more_acc = tl.load(acc_ptr + where, mask=live[:, None], other=0.0, cache_modifier=".cg")
        peak, total, acc = _fold(peak, total, acc, more_peak, more_total, more_acc)
    head = kv_head * GROUP + (tile * BLOCK_M + pair) % GROUP
    _store_out(
        out_ptr, sinks_ptr, (begin + row).to(tl.int64), head, live, peak, total, acc, NUM_HEADS, HEAD_DIM,
        BLOCK_D, HAS_SINKS,
    )  # fmt: skip


@triton.jit
def _cache_rows(
    qkv_ptr, cos_ptr, sin_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, visible_ptr, begin, rows,
    kv_head, end, row_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a request's own rows of one KV head to the cache, if keys before `end` may be among them.

    A row's KV index is visible - 1, or visible and more in a tree. Every program that may read such a row
    writes it: all write the same bits, and nobody has to wait for another one.
    """
    row = tl.arange(0, BLOCK_R)
    token = (begin + row).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=row < rows, other=-1)
    cached = slot >= 0
    visible = tl.load(visible_ptr + token, mask=cached, other=2147483647)
    if end >= tl.min(visible):
        d = tl.arange(0, BLOCK_D)
        mask = cached[:, None] & (d < HEAD_DIM)[None, :]
        where = token * row_stride + (NUM_HEADS + kv_head) * HEAD_DIM
        key = rotated(
            qkv_ptr, where, token, cached, cos_ptr, sin_ptr, cos_ptr, 0.0, False, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        where += NUM_KV_HEADS * HEAD_DIM
        value = tl.load(qkv_ptr + where[:, None] + d[None, :], mask=mask, other=0.0)
        goal = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(key_cache_ptr + goal, key, mask=mask)
        tl.store(value_cache_ptr + goal, value, mask=mask)
    tl.debug_barrier()


@triton.jit
def _attend_tile(
    peak, total, acc, start, query, key_cache_ptr, value_cache_ptr, pages_ptr, kv_head, visible, bits, low,
    last, scale, window, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The state (peak, total, acc) of a chunk after the keys [start, start + BLOCK_N) of it."""
    d = tl.arange(0, BLOCK_D)
    key_index = start + tl.arange(0, BLOCK_N)
    inside = key_index < last
    page = tl.load(pages_ptr + key_index // PAGE_SIZE, mask=inside, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + key_index % PAGE_SIZE
    key_at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    key = tl.load(key_cache_ptr + key_at, mask=mask, other=0.0)
    allowed = key_index[None, :] < visible[:, None]
    if HAS_WINDOW:
        allowed &= key_index[None, :] >= low[:, None] - window
    if HAS_TREE:
        own = key_index[None, :] - visible[:, None]
        bit = (bits[:, None] >> tl.minimum(tl.maximum(own, 0), 62).to(tl.int64)) & 1
        allowed |= (own >= 0) & (own < 63) & (bit == 1) & inside[None, :]
    if EXACT:
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(key))
    scores = tl.where(allowed, scores * scale, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet keeps weights of zero instead of exp2(-inf + inf).
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    value = tl.load(value_cache_ptr + key_at, mask=mask, other=0.0)
    if EXACT:
        update = tl.dot(weights, value.to(tl.float32), input_precision="ieee")
    else:
        update = tl.dot(weights.to(value.dtype), value)
    return top, tl.fma(total, shrink, tl.sum(weights, 1)), tl.fma(acc, shrink[:, None], update)


@triton.jit
def attention_kernel(
    query_ptr, key_cache_ptr, value_cache_ptr, out_ptr, page_table_ptr, q_start_ptr, visible_ptr,
    tree_bits_ptr, sinks_ptr, slots_ptr, cos_ptr, sin_ptr, acc_ptr, peak_ptr, total_ptr, arrivals_ptr,
    scale, query_stride, page_stride, num_pages, window, splits, max_chunks, kept_pairs,
    PAGE_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, HAS_SINKS: tl.constexpr,
    ROTATE: tl.constexpr, SPLIT: tl.constexpr, LAST_FOLDS: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a KV head, a tile of a request's pairs, and its chunks split, split + splits, ..."""
    if PDL:
        # The next kernel may fetch its weights while this one runs.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    tile = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    request = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    begin = tl.load(q_start_ptr + request)
    rows = tl.load(q_start_ptr + request + 1) - begin
    token, pair, live, visible, bits, low, last, first_chunk, num_chunks = _tile(
        q_start_ptr, visible_ptr, tree_bits_ptr, request, tile, num_pages * PAGE_SIZE, window, GROUP,
        BLOCK_M, CHUNK, HAS_WINDOW, HAS_TREE,
    )  # fmt: skip
    workers = tl.maximum(tl.minimum(splits, num_chunks), 1)
    if (split >= workers) | (tile * BLOCK_M >= rows * GROUP):
        return
    head = kv_head * GROUP + pair % GROUP
    d = tl.arange(0, BLOCK_D)
    where = token * query_stride + head * HEAD_DIM
    if ROTATE:
        query = rotated(
            query_ptr, where, token, live, cos_ptr, sin_ptr, cos_ptr, 0.0, False, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        newest = split + tl.maximum(num_chunks - 1 - split, 0) // splits * splits
        _cache_rows(
            query_ptr, cos_ptr, sin_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, visible_ptr, begin,
            rows, kv_head, (first_chunk + newest + 1) * CHUNK, query_stride, NUM_HEADS, NUM_KV_HEADS,
            HEAD_DIM, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        mask = live[:, None] & (d < HEAD_DIM)[None, :]
        query = tl.load(query_ptr + where[:, None] + d[None, :], mask=mask, other=0.0)
    pages_ptr = page_table_ptr + request * page_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SPLIT:
        place = ((request * (tl.num_programs(1) // splits) + tile) * NUM_KV_HEADS + kv_head).to(tl.int64)
        for chunk in range(split, num_chunks, splits):
            start = (first_chunk + chunk) * CHUNK
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for at in range(start, tl.minimum(start + CHUNK, last), BLOCK_N):
                peak, total, acc = _attend_tile(
                    peak, total, acc, at, query, key_cache_ptr, value_cache_ptr, pages_ptr, kv_head, visible,
                    bits, low, last, scale, window, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
                    HAS_WINDOW, HAS_TREE, EXACT,
                )  # fmt: skip
            # A tile's only chunk is the whole and stays where it is.
            if num_chunks > 1:
                goal = (place * max_chunks + chunk) * kept_pairs + tl.arange(0, BLOCK_M)
                tl.store(peak_ptr + goal, peak, mask=live)
                tl.store(total_ptr + goal, total, mask=live)
                tl.store(acc_ptr + goal[:, None] * BLOCK_D + d[None, :], acc, mask=live[:, None])
        if LAST_FOLDS and num_chunks > 1:
            # All threads have stored before one of them counts; who counts last sees all of it.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + place, 1, sem="acq_rel", scope="gpu")
            if arrived == workers - 1:
                tl.store(arrivals_ptr + place, 0)
                pairs = tl.minimum(rows * GROUP - tile * BLOCK_M, BLOCK_M)
                for piece in range((pairs + PIECE - 1) // PIECE):
                    _fold_stored(
                        out_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, begin, rows, kv_head, tile, piece,
                        place, num_chunks, max_chunks, kept_pairs, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_M,
                        BLOCK_D, HAS_SINKS,
                    )  # fmt: skip
    else:
        whole_peak, whole_total, whole_acc = peak, total, acc
        for at in range(first_chunk * CHUNK, last, BLOCK_N):
            peak, total, acc = _attend_tile(
                peak, total, acc, at, query, key_cache_ptr, value_cache_ptr, pages_ptr, kv_head, visible,
                bits, low, last, scale, window, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
                HAS_WINDOW, HAS_TREE, EXACT,
            )  # fmt: skip
            if (at + BLOCK_N) % CHUNK == 0:
                whole_peak, whole_total, whole_acc = _fold(
                    whole_peak, whole_total, whole_acc, peak, total, acc
                )
                peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak, total, acc = _fold(whole_peak, whole_total, whole_acc, peak, total, acc)
    if (not SPLIT) or num_chunks <= 1:
        _store_out(
            out_ptr, sinks_ptr, token, head, live, peak, total, acc, NUM_HEADS, HEAD_DIM, BLOCK_D, HAS_SINKS,
        )  # fmt: skip


@triton.jit
def fold_kernel(
    out_ptr, q_start_ptr, visible_ptr, tree_bits_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, num_keys,
    window, max_chunks, kept_pairs, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The second pass where the last program doesn't fold; tiles of one chunk are written already."""
    PIECES: tl.constexpr = BLOCK_M // PIECE
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head, tile, request = tl.program_id(0), tl.program_id(1) // PIECES, tl.program_id(2)
    begin = tl.load(q_start_ptr + request)
    rows = tl.load(q_start_ptr + request + 1) - begin
    _, _, _, _, _, _, _, _, num_chunks = _tile(
        q_start_ptr, visible_ptr, tree_bits_ptr, request, tile, num_keys, window, GROUP, BLOCK_M, CHUNK,
        HAS_WINDOW, HAS_TREE,
    )  # fmt: skip
    if num_chunks > 1:
        place = ((request * (tl.num_programs(1) // PIECES) + tile) * NUM_KV_HEADS + kv_head).to(tl.int64)
        _fold_stored(
            out_ptr, sinks_ptr, acc_ptr, peak_ptr, total_ptr, begin, rows, kv_head, tile,
            tl.program_id(1) % PIECES, place, num_chunks, max_chunks, kept_pairs, NUM_HEADS, GROUP,
            HEAD_DIM, BLOCK_M, BLOCK_D, HAS_SINKS,
        )  # fmt: skip
