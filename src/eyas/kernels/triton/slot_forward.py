"""Slot attention, forward: a tile of queries walks over its staircase of keys with a running softmax."""

# ruff: noqa: ANN001, ANN201, ANN202, FBT003 - the bodies of kernels are Triton's language

import triton
import triton.language as tl

from eyas.kernels.triton.slot_tiles import dot, edges, load_rows


@triton.jit
def _absorb(
    query,
    peak,
    total,
    acc,
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
    """One tile of keys into the running softmax."""
    d = tl.arange(0, BLOCK_D)
    index = start + tl.arange(0, BLOCK_N)
    inside = index < stop
    key = load_rows(keys, index, key_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    scores = dot(query, tl.trans(key), EXACT) * scale2
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
    value = load_rows(values, index, value_stride, inside, d, HEAD_DIM, BLOCK_D, MASKED)
    acc = acc * shrink[:, None] + dot(weights.to(value.dtype), value, EXACT)
    total = total * shrink + tl.sum(weights, 1)
    return new_peak, total, acc


@triton.jit
def forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    own_key_ptr,
    own_value_ptr,
    first_ptr,
    last_ptr,
    own_ptr,
    out_ptr,
    lse_ptr,
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
    scale2,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Output and log-sum-exp of one tile of queries."""
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
    query = load_rows(query_base, slot, query_stride, live, d, HEAD_DIM, BLOCK_D, True)
    low = tl.load(first_ptr + batch * num_slots + slot, mask=live, other=0)
    high = tl.load(last_ptr + batch * num_slots + slot, mask=live, other=0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = key_ptr + batch * key_batch + kv_head * HEAD_DIM
    values = value_ptr + batch * value_batch + kv_head * HEAD_DIM
    begin, full, full_end, end, left, right = edges(low, high, live, BLOCK_N)
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
