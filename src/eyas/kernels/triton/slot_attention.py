"""Attention of training slots without a mask matrix: flash attention over a staircase (reference twin: Stairs).

Slots of one rollout stand side by side and rollouts are sorted by anchor, so a tile of queries reads one
contiguous range of context keys and one narrow band of own keys. Tiles inside the range need no mask; those
at its ends compare key indices with two integers a query. The G query heads of a KV head are rows of the
same tile: row m is slot m // G, head m % G of the group.

Backward is two kernels: queries that walk over their keys (dq), keys that walk over their queries (dk, dv;
Stairs.bounds says which). No atomics, so the same inputs give the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.slot_attention import KEY_TILE, Stairs


class Tiles(NamedTuple):
    """Sizes of one kernel's tiles: rows (slots x group), keys, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


LOG2E = 1.4426950408889634

FORCED: dict[str, Tiles] = {}
"""Tiles by kernel ("forward", "queries", "keys") that stand before the table: for tests and tuning."""
_WORKING: dict[Any, Tiles] = {}


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[Tiles]:
    """Tiles to try in order: a device whose shared memory is too small for one takes the next."""
    if kernel in FORCED:
        return [FORCED[kernel]]
    small = [Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)]
    if dtype == torch.float32 or head_dim > 128:
        return small
    if kernel == "keys":
        return [Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), *small]
    return [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), *small]


def _launch(kernel: str, head_dim: int, dtype: torch.dtype, group: int, run: Callable[[Tiles], None]) -> None:
    key = (kernel, head_dim, dtype, group, FORCED.get(kernel))
    known = _WORKING.get(key)
    if known is not None:
        run(known)
        return
    failure: Exception | None = None
    for tiles in candidates(kernel, head_dim, dtype):
        if tiles.rows < group:
            continue
        try:
            run(tiles)
        except triton.runtime.errors.OutOfResources as error:
            failure = error
            continue
        _WORKING[key] = tiles
        return
    raise RuntimeError(f"no tiles of {kernel} fit this device ({head_dim=}, {dtype=}, {group=})") from failure


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):  # noqa: ANN001, ANN202
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _load(
    base, index, stride, inside, d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `index` of a [rows, HEAD_DIM] matrix as [len(index), BLOCK_D]; zeros outside."""
    where = base + index.to(tl.int64)[:, None] * stride + d[None, :]
    if HEAD_DIM == BLOCK_D:
        if MASKED:
            return tl.load(where, mask=inside[:, None], other=0.0)
        return tl.load(where)
    if MASKED:
        return tl.load(where, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return tl.load(where, mask=(d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _absorb(  # noqa: ANN202
    query,  # noqa: ANN001
    peak,  # noqa: ANN001
    total,  # noqa: ANN001
    acc,  # noqa: ANN001
    keys,  # noqa: ANN001
    values,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    start,  # noqa: ANN001
    stop,  # noqa: ANN001
    low,  # noqa: ANN001
    high,  # noqa: ANN001
    scale2,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of keys into the running softmax."""
    d = tl.arange(0, BLOCK_D)
    index = start + tl.arange(0, BLOCK_N)
    inside = index < stop
    key = _load(keys, index, key_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    scores = _dot(query, tl.trans(key), EXACT) * scale2
    if MASKED:
        allowed = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
        scores = tl.where(allowed, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = new_peak
    if MASKED:
        # A row that has seen nothing yet keeps weights of zero instead of exp(-inf + inf).
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    value = _load(values, index, value_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    acc = acc * shrink[:, None] + _dot(weights.to(value.dtype), value, EXACT)
    total = total * shrink + tl.sum(weights, 1)
    return new_peak, total, acc


@triton.jit
def _edges(low, high, live, BLOCK_N: tl.constexpr):  # noqa: ANN001, ANN202
    """Key tiles of a tile of queries: begin, end, and the middle that every query sees whole."""
    begin = (tl.min(tl.where(live, low, 2147483647)) // BLOCK_N) * BLOCK_N
    end = tl.max(tl.where(live, high, 0))
    full = ((tl.max(tl.where(live, low, 0)) + BLOCK_N - 1) // BLOCK_N) * BLOCK_N
    full_end = (tl.min(tl.where(live, high, 2147483647)) // BLOCK_N) * BLOCK_N
    begin = tl.minimum(begin, end)
    full = tl.minimum(tl.maximum(full, begin), end)
    full_end = tl.maximum(tl.minimum(full_end, end), full)
    left = (full - begin + BLOCK_N - 1) // BLOCK_N
    right = (end - full_end + BLOCK_N - 1) // BLOCK_N
    # Without a middle everything is edge.
    left = tl.where(full_end == full, (end - begin + BLOCK_N - 1) // BLOCK_N, left)
    right = tl.where(full_end == full, 0, right)
    return begin, full, full_end, end, left, right


@triton.jit
def _forward_kernel(  # noqa: ANN202
    query_ptr,  # noqa: ANN001
    key_ptr,  # noqa: ANN001
    value_ptr,  # noqa: ANN001
    own_key_ptr,  # noqa: ANN001
    own_value_ptr,  # noqa: ANN001
    first_ptr,  # noqa: ANN001
    last_ptr,  # noqa: ANN001
    own_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    num_slots,  # noqa: ANN001
    num_own,  # noqa: ANN001
    query_batch,  # noqa: ANN001
    query_stride,  # noqa: ANN001
    key_batch,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_batch,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    own_key_batch,  # noqa: ANN001
    own_key_stride,  # noqa: ANN001
    own_value_batch,  # noqa: ANN001
    own_value_stride,  # noqa: ANN001
    scale2,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    SLOTS: tl.constexpr = BLOCK_M // GROUP
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    # The last slots see most: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    slot = tile * SLOTS + m // GROUP
    live = (m < SLOTS * GROUP) & (slot < num_slots)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    query_base = query_ptr + batch * query_batch + head[:, None] * HEAD_DIM
    query = _load(query_base, slot, query_stride, live, d, HEAD_DIM, BLOCK_D, True)
    low = tl.load(first_ptr + batch * num_slots + slot, mask=live, other=0)
    high = tl.load(last_ptr + batch * num_slots + slot, mask=live, other=0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = key_ptr + batch * key_batch + kv_head * HEAD_DIM
    values = value_ptr + batch * value_batch + kv_head * HEAD_DIM
    begin, full, full_end, end, left, right = _edges(low, high, live, BLOCK_N)
    for start in range(full, full_end, BLOCK_N):
        peak, total, acc = _absorb(
            query, peak, total, acc, keys, values, key_stride, value_stride, start, end, low, high, scale2,
            HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT,
        )  # fmt: skip
    for edge in range(left + right):
        start = tl.where(edge < left, begin + edge * BLOCK_N, full_end + (edge - left) * BLOCK_N)
        peak, total, acc = _absorb(
            query, peak, total, acc, keys, values, key_stride, value_stride, start, end, low, high, scale2,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
    place = slot - (num_slots - num_own)
    rolled = live & (place >= 0)
    own_low = tl.load(own_ptr + batch * num_own + place, mask=rolled, other=0)
    own_high = tl.where(rolled, place + 1, 0)
    own_end = tl.max(own_high)
    own_begin = tl.minimum(tl.min(tl.where(rolled, own_low, 2147483647)), own_end)
    keys = own_key_ptr + batch * own_key_batch + kv_head * HEAD_DIM
    values = own_value_ptr + batch * own_value_batch + kv_head * HEAD_DIM
    for start in range(own_begin, own_end, BLOCK_N):
        peak, total, acc = _absorb(
            query, peak, total, acc, keys, values, own_key_stride, own_value_stride, start, own_end,
            own_low, own_high, scale2, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(
        total > 0, (peak + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf")
    )
    row = (batch * num_slots + slot) * NUM_HEADS + head
    tl.store(lse_ptr + row, lse, mask=live)
    store_mask = live[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(
        out_ptr + row[:, None] * HEAD_DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=store_mask
    )


@triton.jit
def _delta_kernel(  # noqa: ANN202
    out_ptr,  # noqa: ANN001
    grad_ptr,  # noqa: ANN001
    grad_lse_ptr,  # noqa: ANN001
    delta_ptr,  # noqa: ANN001
    num_rows,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    live = row < num_rows
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    where = row[:, None] * HEAD_DIM + d[None, :]
    out = tl.load(out_ptr + where, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + where, mask=mask, other=0.0).to(tl.float32)
    grad_lse = tl.load(grad_lse_ptr + row, mask=live, other=0.0)
    tl.store(delta_ptr + row, tl.sum(out * grad, 1) - grad_lse, mask=live)


@triton.jit
def _pull(  # noqa: ANN202
    query,  # noqa: ANN001
    grad,  # noqa: ANN001
    lse2,  # noqa: ANN001
    delta,  # noqa: ANN001
    grad_query,  # noqa: ANN001
    keys,  # noqa: ANN001
    values,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    start,  # noqa: ANN001
    stop,  # noqa: ANN001
    low,  # noqa: ANN001
    high,  # noqa: ANN001
    scale2,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of keys into dq (without the scale)."""
    d = tl.arange(0, BLOCK_D)
    index = start + tl.arange(0, BLOCK_N)
    inside = index < stop
    key = _load(keys, index, key_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    value = _load(values, index, value_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    weights = tl.exp2(_dot(query, tl.trans(key), EXACT) * scale2 - lse2[:, None])
    if MASKED:
        allowed = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
        weights = tl.where(allowed, weights, 0.0)
    slope = weights * (_dot(grad, tl.trans(value), EXACT) - delta[:, None])
    return grad_query + _dot(slope.to(key.dtype), key, EXACT)


@triton.jit
def _queries_kernel(  # noqa: ANN202
    query_ptr,  # noqa: ANN001
    key_ptr,  # noqa: ANN001
    value_ptr,  # noqa: ANN001
    own_key_ptr,  # noqa: ANN001
    own_value_ptr,  # noqa: ANN001
    first_ptr,  # noqa: ANN001
    last_ptr,  # noqa: ANN001
    own_ptr,  # noqa: ANN001
    grad_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    delta_ptr,  # noqa: ANN001
    grad_query_ptr,  # noqa: ANN001
    num_slots,  # noqa: ANN001
    num_own,  # noqa: ANN001
    query_batch,  # noqa: ANN001
    query_stride,  # noqa: ANN001
    key_batch,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_batch,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    own_key_batch,  # noqa: ANN001
    own_key_stride,  # noqa: ANN001
    own_value_batch,  # noqa: ANN001
    own_value_stride,  # noqa: ANN001
    scale,  # noqa: ANN001
    scale2,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    SLOTS: tl.constexpr = BLOCK_M // GROUP
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    slot = tile * SLOTS + m // GROUP
    live = (m < SLOTS * GROUP) & (slot < num_slots)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    query_base = query_ptr + batch * query_batch + head[:, None] * HEAD_DIM
    query = _load(query_base, slot, query_stride, live, d, HEAD_DIM, BLOCK_D, True)
    row = (batch * num_slots + slot) * NUM_HEADS + head
    row_mask = live[:, None] & (d < HEAD_DIM)[None, :]
    grad = tl.load(grad_ptr + row[:, None] * HEAD_DIM + d[None, :], mask=row_mask, other=0.0)
    lse2 = tl.load(lse_ptr + row, mask=live, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + row, mask=live, other=0.0)
    low = tl.load(first_ptr + batch * num_slots + slot, mask=live, other=0)
    high = tl.load(last_ptr + batch * num_slots + slot, mask=live, other=0)
    grad_query = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = key_ptr + batch * key_batch + kv_head * HEAD_DIM
    values = value_ptr + batch * value_batch + kv_head * HEAD_DIM
    begin, full, full_end, end, left, right = _edges(low, high, live, BLOCK_N)
    for start in range(full, full_end, BLOCK_N):
        grad_query = _pull(
            query, grad, lse2, delta, grad_query, keys, values, key_stride, value_stride, start, end,
            low, high, scale2, HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT,
        )  # fmt: skip
    for edge in range(left + right):
        start = tl.where(edge < left, begin + edge * BLOCK_N, full_end + (edge - left) * BLOCK_N)
        grad_query = _pull(
            query, grad, lse2, delta, grad_query, keys, values, key_stride, value_stride, start, end,
            low, high, scale2, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
    place = slot - (num_slots - num_own)
    rolled = live & (place >= 0)
    own_low = tl.load(own_ptr + batch * num_own + place, mask=rolled, other=0)
    own_high = tl.where(rolled, place + 1, 0)
    own_end = tl.max(own_high)
    own_begin = tl.minimum(tl.min(tl.where(rolled, own_low, 2147483647)), own_end)
    keys = own_key_ptr + batch * own_key_batch + kv_head * HEAD_DIM
    values = own_value_ptr + batch * own_value_batch + kv_head * HEAD_DIM
    for start in range(own_begin, own_end, BLOCK_N):
        grad_query = _pull(
            query, grad, lse2, delta, grad_query, keys, values, own_key_stride, own_value_stride, start, own_end,
            own_low, own_high, scale2, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
    tl.store(
        grad_query_ptr + row[:, None] * HEAD_DIM + d[None, :],
        (grad_query * scale).to(grad_query_ptr.dtype.element_ty),
        mask=row_mask,
    )


@triton.jit
def _push(  # noqa: ANN202
    grad_key,  # noqa: ANN001
    grad_value,  # noqa: ANN001
    key,  # noqa: ANN001
    value,  # noqa: ANN001
    index,  # noqa: ANN001
    queries,  # noqa: ANN001
    grads,  # noqa: ANN001
    lses,  # noqa: ANN001
    deltas,  # noqa: ANN001
    lows,  # noqa: ANN001
    highs,  # noqa: ANN001
    query_stride,  # noqa: ANN001
    start,  # noqa: ANN001
    stop,  # noqa: ANN001
    scale2,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    OWN: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of query rows into dk (without the scale) and dv; pointers stand at the KV head's first row."""
    SLOTS: tl.constexpr = BLOCK_M // GROUP
    CHECKED: tl.constexpr = MASKED or (SLOTS * GROUP != BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    slot = start + m // GROUP
    live = (m < SLOTS * GROUP) & (slot < stop)
    d = tl.arange(0, BLOCK_D)
    member = m % GROUP
    # Rows outside load zeros: their weights then meet zeros only.
    query = _load(
        queries + member[:, None] * HEAD_DIM, slot, query_stride, live, d, HEAD_DIM, BLOCK_D,
        CHECKED,
    )  # fmt: skip
    grad = _load(
        grads + member[:, None] * HEAD_DIM, slot, NUM_HEADS * HEAD_DIM, live, d, HEAD_DIM, BLOCK_D,
        CHECKED,
    )  # fmt: skip
    row = slot.to(tl.int64) * NUM_HEADS + member
    lse2 = tl.load(lses + row, mask=live, other=0.0) * 1.4426950408889634
    delta = tl.load(deltas + row, mask=live, other=0.0)
    weights = tl.exp2(_dot(key, tl.trans(query), EXACT) * scale2 - lse2[None, :])
    if MASKED:
        low = tl.load(lows + slot, mask=live, other=0)
        if OWN:
            high = tl.where(live, slot + 1, 0)
        else:
            high = tl.load(highs + slot, mask=live, other=0)
        allowed = (index[:, None] >= low[None, :]) & (index[:, None] < high[None, :])
        weights = tl.where(allowed, weights, 0.0)
    grad_value += _dot(weights.to(grad.dtype), grad, EXACT)
    slope = weights * (_dot(value, tl.trans(grad), EXACT) - delta[None, :])
    grad_key += _dot(slope.to(query.dtype), query, EXACT)
    return grad_key, grad_value


@triton.jit
def _keys_kernel(  # noqa: ANN202
    query_ptr,  # noqa: ANN001
    key_ptr,  # noqa: ANN001
    value_ptr,  # noqa: ANN001
    low_ptr,  # noqa: ANN001
    high_ptr,  # noqa: ANN001
    bounds_ptr,  # noqa: ANN001
    grad_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    delta_ptr,  # noqa: ANN001
    grad_key_ptr,  # noqa: ANN001
    grad_value_ptr,  # noqa: ANN001
    num_slots,  # noqa: ANN001
    num_keys,  # noqa: ANN001
    num_bounds,  # noqa: ANN001
    query_batch,  # noqa: ANN001
    query_stride,  # noqa: ANN001
    key_batch,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_batch,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    scale,  # noqa: ANN001
    scale2,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_BOUND: tl.constexpr,
    OWN: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradients of one tile of context keys, or (OWN) of own keys, whose queries are the last num_keys slots."""
    SLOTS: tl.constexpr = BLOCK_M // GROUP
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    tile = tl.program_id(0)
    index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = index < num_keys
    d = tl.arange(0, BLOCK_D)
    key = _load(
        key_ptr + batch * key_batch + kv_head * HEAD_DIM,
        index,
        key_stride,
        inside,
        d,
        HEAD_DIM,
        BLOCK_D,
        True,
    )
    value = _load(
        value_ptr + batch * value_batch + kv_head * HEAD_DIM,
        index,
        value_stride,
        inside,
        d,
        HEAD_DIM,
        BLOCK_D,
        True,
    )
    grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Own keys number their queries from the first rollout slot on.
    shift = batch * 0
    if OWN:
        shift += num_slots - num_keys
    skipped = batch * num_slots + shift
    queries = query_ptr + batch * query_batch + shift * query_stride + kv_head * GROUP * HEAD_DIM
    grads = grad_ptr + (skipped * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    lses = lse_ptr + skipped * NUM_HEADS + kv_head * GROUP
    deltas = delta_ptr + skipped * NUM_HEADS + kv_head * GROUP
    bound = batch * num_bounds + tile // PER_BOUND
    if OWN:
        lows = low_ptr + batch * num_keys
        stop = tl.load(bounds_ptr + bound)
        for start in range(tile * BLOCK_N, stop, SLOTS):
            grad_key, grad_value = _push(
                grad_key, grad_value, key, value, index, queries, grads, lses, deltas, lows, lows,
                query_stride, start, stop, scale2,
                NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, True, True, EXACT,
            )  # fmt: skip
    else:
        lows = low_ptr + batch * num_slots
        highs = high_ptr + batch * num_slots
        for run in range(2):
            begin = tl.load(bounds_ptr + bound * 8 + run * 4)
            full = tl.load(bounds_ptr + bound * 8 + run * 4 + 1)
            full_end = tl.load(bounds_ptr + bound * 8 + run * 4 + 2)
            end = tl.load(bounds_ptr + bound * 8 + run * 4 + 3)
            left = (full - begin + SLOTS - 1) // SLOTS
            middle = tl.maximum((full_end - begin) // SLOTS - left, 0)
            tiles = (end - begin + SLOTS - 1) // SLOTS
            for step in range(left, left + middle):
                grad_key, grad_value = _push(
                    grad_key, grad_value, key, value, index, queries, grads, lses, deltas, lows, highs,
                    query_stride, begin + step * SLOTS, end, scale2,
                    NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, False, False, EXACT,
                )  # fmt: skip
            for edge in range(tiles - middle):
                step = tl.where(edge < left, edge, edge + middle)
                grad_key, grad_value = _push(
                    grad_key, grad_value, key, value, index, queries, grads, lses, deltas, lows, highs,
                    query_stride, begin + step * SLOTS, end, scale2,
                    NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, True, False, EXACT,
                )  # fmt: skip
    where = ((batch * num_keys + index) * (NUM_HEADS // GROUP) + kv_head)[:, None] * HEAD_DIM + d[None, :]
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(grad_key_ptr + where, (grad_key * scale).to(grad_key_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_value_ptr + where, grad_value.to(grad_value_ptr.dtype.element_ty), mask=mask)


def _flat(x: Tensor) -> Tensor:
    """[B, M, heads, dh] whose heads stand side by side; batch and slot strides are free."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def _constants(queries: Tensor, kv_heads: int) -> dict[str, Any]:
    heads, head_dim = queries.shape[-2:]
    return {
        "NUM_HEADS": heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "EXACT": queries.dtype == torch.float32,
    }


@torch.library.custom_op("eyas::stairs_forward", mutates_args=())
def _forward(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    first: Tensor,
    last: Tensor,
    own: Tensor,
    bounds: Tensor,
    own_bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, num_slots, heads, head_dim = queries.shape
    kv_heads = context_keys.shape[2]
    group = heads // kv_heads
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(queries.shape[:-1], dtype=torch.float32, device=queries.device)
    inputs = [_flat(x) for x in (queries, context_keys, context_values, own_keys, own_values)]
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    constants = _constants(queries, kv_heads)

    def run(tiles: Tiles) -> None:
        grid = (triton.cdiv(num_slots, tiles.rows // group), kv_heads, batch)
        _forward_kernel[grid](
            *inputs,
            first,
            last,
            own,
            out,
            lse,
            num_slots,
            own.shape[1],
            *strides,
            scale * LOG2E,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    if out.numel():
        _launch("forward", head_dim, queries.dtype, group, run)
    return out, lse


@_forward.register_fake
def _(queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    return out, torch.empty(queries.shape[:-1], dtype=torch.float32, device=queries.device)


@torch.library.custom_op("eyas::stairs_backward", mutates_args=())
def _backward(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    first: Tensor,
    last: Tensor,
    own: Tensor,
    bounds: Tensor,
    own_bounds: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, num_slots, heads, head_dim = queries.shape
    kv_heads, dtype, device = context_keys.shape[2], queries.dtype, queries.device
    group = heads // kv_heads
    inputs = [_flat(x) for x in (queries, context_keys, context_values, own_keys, own_values)]
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs]
    constants = _constants(queries, kv_heads)
    grad, out = grad.contiguous(), out.contiguous()
    delta = torch.empty_like(lse)
    if not out.numel():
        grads = [x.zero_() for x in grads]
        return grads[0], grads[1], grads[2], grads[3], grads[4]
    _delta_kernel[(triton.cdiv(lse.numel(), 32),)](
        out, grad, grad_lse.contiguous(), delta, lse.numel(), constants["HEAD_DIM"], constants["BLOCK_D"], 32
    )

    def run_queries(tiles: Tiles) -> None:
        grid = (triton.cdiv(num_slots, tiles.rows // group), kv_heads, batch)
        _queries_kernel[grid](
            *inputs,
            first,
            last,
            own,
            grad,
            lse,
            delta,
            grads[0],
            num_slots,
            own.shape[1],
            *strides,
            scale,
            scale * LOG2E,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def run_keys(tiles: Tiles, *, rolled: bool) -> None:
        at = 3 if rolled else 1
        num_keys = inputs[at].shape[1]
        if not num_keys:
            return
        _keys_kernel[(triton.cdiv(num_keys, tiles.keys), kv_heads, batch)](
            inputs[0],
            inputs[at],
            inputs[at + 1],
            own if rolled else first,
            last,
            own_bounds if rolled else bounds,
            grad,
            lse,
            delta,
            grads[at],
            grads[at + 1],
            num_slots,
            num_keys,
            (own_bounds if rolled else bounds).shape[1],
            *strides[:2],
            *strides[2 * at : 2 * at + 4],
            scale,
            scale * LOG2E,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            PER_BOUND=KEY_TILE // tiles.keys,
            OWN=rolled,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    _launch("queries", head_dim, dtype, group, run_queries)
    _launch("keys", head_dim, dtype, group, lambda tiles: run_keys(tiles, rolled=False))
    _launch("keys", head_dim, dtype, group, lambda tiles: run_keys(tiles, rolled=True))
    return grads[0], grads[1], grads[2], grads[3], grads[4]


@_backward.register_fake
def _(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *rest: Any,  # noqa: ARG001
) -> tuple[Tensor, ...]:
    inputs = (queries, context_keys, context_values, own_keys, own_values)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:-1], *output)
    ctx.scale = inputs[-1]


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(*ctx.saved_tensors, grad, grad_lse, ctx.scale), *(None,) * 6)


_forward.register_autograd(_gradients, setup_context=_save)


def stairs_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    stairs: Stairs,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.slot_attention.stairs_attention; all five tensors of one type."""
    out, lse = _forward(queries, context_keys, context_values, own_keys, own_values, *stairs, scale)
    return out, lse
