"""Slot attention, backward: queries walk over their keys (dq), keys over their queries (dk, dv)."""

# ruff: noqa: ANN001, ANN201, ANN202, FBT003 - the bodies of kernels are Triton's language

import triton
import triton.language as tl

from eyas.kernels.triton.slot_tiles import dot, edges, load_rows


@triton.jit
def delta_kernel(
    out_ptr,
    grad_ptr,
    grad_lse_ptr,
    delta_ptr,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Row sums of out * grad, less the gradient that came through the lse."""
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
def _pull(
    query,
    grad,
    lse2,
    delta,
    grad_query,
    keys,
    values,
    key_stride,
    value_stride,
    start,
    stop,
    low,
    high,
    scale2,
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
    key = load_rows(keys, index, key_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    value = load_rows(values, index, value_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    weights = tl.exp2(dot(query, tl.trans(key), EXACT) * scale2 - lse2[:, None])
    if MASKED:
        allowed = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
        weights = tl.where(allowed, weights, 0.0)
    slope = weights * (dot(grad, tl.trans(value), EXACT) - delta[:, None])
    return grad_query + dot(slope.to(key.dtype), key, EXACT)


@triton.jit
def queries_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    own_key_ptr,
    own_value_ptr,
    first_ptr,
    last_ptr,
    own_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_query_ptr,
    num_slots,
    num_own,
    query_batch,
    query_stride,
    key_batch,
    key_stride,
    value_batch,
    value_stride,
    own_key_batch,
    own_key_stride,
    own_value_batch,
    own_value_stride,
    scale,
    scale2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Gradient of one tile of queries."""
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
    query = load_rows(query_base, slot, query_stride, live, d, HEAD_DIM, BLOCK_D, True)
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
    begin, full, full_end, end, left, right = edges(low, high, live, BLOCK_N)
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
            query, grad, lse2, delta, grad_query, keys, values, own_key_stride, own_value_stride, start,
            own_end, own_low, own_high, scale2, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
    tl.store(
        grad_query_ptr + row[:, None] * HEAD_DIM + d[None, :],
        (grad_query * scale).to(grad_query_ptr.dtype.element_ty),
        mask=row_mask,
    )


@triton.jit
def _push(
    grad_key,
    grad_value,
    key,
    value,
    index,
    queries,
    grads,
    lses,
    deltas,
    lows,
    highs,
    query_stride,
    start,
    stop,
    scale2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    OWN: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of query rows into dk (without the scale) and dv; pointers stand at the KV head's row 0."""
    SLOTS: tl.constexpr = BLOCK_M // GROUP
    CHECKED: tl.constexpr = MASKED or (SLOTS * GROUP != BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    slot = start + m // GROUP
    live = (m < SLOTS * GROUP) & (slot < stop)
    d = tl.arange(0, BLOCK_D)
    member = m % GROUP
    # Rows outside load zeros: their weights then meet zeros only.
    query = load_rows(
        queries + member[:, None] * HEAD_DIM, slot, query_stride, live, d, HEAD_DIM, BLOCK_D,
        CHECKED,
    )  # fmt: skip
    grad = load_rows(
        grads + member[:, None] * HEAD_DIM, slot, NUM_HEADS * HEAD_DIM, live, d, HEAD_DIM, BLOCK_D,
        CHECKED,
    )  # fmt: skip
    row = slot.to(tl.int64) * NUM_HEADS + member
    lse2 = tl.load(lses + row, mask=live, other=0.0) * 1.4426950408889634
    delta = tl.load(deltas + row, mask=live, other=0.0)
    weights = tl.exp2(dot(key, tl.trans(query), EXACT) * scale2 - lse2[None, :])
    if MASKED:
        low = tl.load(lows + slot, mask=live, other=0)
        if OWN:  # noqa: SIM108 - chosen while compiling
            high = tl.where(live, slot + 1, 0)
        else:
            high = tl.load(highs + slot, mask=live, other=0)
        allowed = (index[:, None] >= low[None, :]) & (index[:, None] < high[None, :])
        weights = tl.where(allowed, weights, 0.0)
    grad_value += dot(weights.to(grad.dtype), grad, EXACT)
    slope = weights * (dot(value, tl.trans(grad), EXACT) - delta[None, :])
    grad_key += dot(slope.to(query.dtype), query, EXACT)
    return grad_key, grad_value


@triton.jit
def keys_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    low_ptr,
    high_ptr,
    bounds_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_key_ptr,
    grad_value_ptr,
    num_slots,
    num_keys,
    num_bounds,
    query_batch,
    query_stride,
    key_batch,
    key_stride,
    value_batch,
    value_stride,
    scale,
    scale2,
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
    """Gradients of one tile of context keys, or (OWN) of own keys: those of the last num_keys slots."""
    SLOTS: tl.constexpr = BLOCK_M // GROUP
    batch = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    tile = tl.program_id(0)
    index = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = index < num_keys
    d = tl.arange(0, BLOCK_D)
    key = load_rows(
        key_ptr + batch * key_batch + kv_head * HEAD_DIM,
        index,
        key_stride,
        inside,
        d,
        HEAD_DIM,
        BLOCK_D,
        True,
    )
    value = load_rows(
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
