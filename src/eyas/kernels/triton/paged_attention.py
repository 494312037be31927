"""Paged attention with online softmax: one program for a request, a KV head and a tile of (row, head) pairs.

The query rows of a request and the G query heads that share a KV head form the M side of the products:
pair m is row m // G, head m % G of the group. Keys are read page by page in steps of BLOCK_N, from the
first one that any row of the tile may see to the last. Nothing is read back to the host, so that the
call can stand in a CUDA graph; the loop bounds come from `visible`, not from `max_visible`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv_kernel(  # noqa: ANN202
    key_ptr,  # noqa: ANN001
    value_ptr,  # noqa: ANN001
    key_cache_ptr,  # noqa: ANN001
    value_cache_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    key_stride,  # noqa: ANN001
    value_stride,  # noqa: ANN001
    size,  # noqa: ANN001
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        mask = column < size
        key = tl.load(key_ptr + row * key_stride + column, mask=mask)
        value = tl.load(value_ptr + row * value_stride + column, mask=mask)
        tl.store(key_cache_ptr + slot * size + column, key, mask=mask)
        tl.store(value_cache_ptr + slot * size + column, value, mask=mask)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See eyas.kernels.reference.paged_attention.write_kv; rows with slot -1 are not written at all."""
    rows, heads, head_dim = keys.shape
    size = heads * head_dim
    keys, values = _packed_heads(keys), _packed_heads(values)
    if rows:
        _write_kv_kernel[(rows,)](
            keys,
            values,
            key_cache,
            value_cache,
            slots,
            keys.stride(0),
            values.stride(0),
            size,
            BLOCK=triton.next_power_of_2(size),
        )


def _packed_heads(x: Tensor) -> Tensor:
    """The same rows with contiguous heads inside each row (rows themselves may be strided)."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


@triton.jit
def _popcount(bits):  # noqa: ANN001, ANN202
    """Number of ones of non-negative int64, by adding neighbours: pairs, nibbles, bytes, ..."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 127).to(tl.int32)


@triton.jit
def _attention_kernel(  # noqa: ANN202
    query_ptr,  # noqa: ANN001
    key_cache_ptr,  # noqa: ANN001
    value_cache_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    page_table_ptr,  # noqa: ANN001
    q_start_ptr,  # noqa: ANN001
    visible_ptr,  # noqa: ANN001
    tree_bits_ptr,  # noqa: ANN001
    scale,  # noqa: ANN001
    query_stride,  # noqa: ANN001
    pages_per_request,  # noqa: ANN001
    window,  # noqa: ANN001
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    EXACT: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    begin = tl.load(q_start_ptr + request)
    rows = tl.load(q_start_ptr + request + 1) - begin
    pair = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP
    live = row < rows
    head = kv_head * GROUP + pair % GROUP
    visible = tl.load(visible_ptr + begin + row, mask=live, other=0)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    token = (begin + row).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :],
        mask=live[:, None] & d_mask[None, :],
        other=0.0,
    )
    last = tl.max(visible)
    first = 0
    sees = visible > 0
    low = visible
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
        last = tl.minimum(last + _popcount(smeared), pages_per_request * PAGE_SIZE)
        if HAS_WINDOW:
            low = visible + _popcount(bits)
    if HAS_WINDOW:
        lowest = tl.min(tl.where(sees, visible, 2147483647))
        first = (tl.maximum(lowest - window, 0) // BLOCK_N) * BLOCK_N
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        key_index = start + tl.arange(0, BLOCK_N)
        inside = key_index < last
        page = tl.load(
            page_table_ptr + request * pages_per_request + key_index // PAGE_SIZE, mask=inside, other=0
        )
        slot = page.to(tl.int64) * PAGE_SIZE + key_index % PAGE_SIZE
        where = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
        load_mask = inside[:, None] & d_mask[None, :]
        key = tl.load(key_cache_ptr + where[:, None] + d[None, :], mask=load_mask, other=0.0)
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
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet keeps weights of zero instead of exp(-inf + inf).
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        value = tl.load(value_cache_ptr + where[:, None] + d[None, :], mask=load_mask, other=0.0)
        if EXACT:
            update = tl.dot(weights, value.to(tl.float32), input_precision="ieee")
        else:
            update = tl.dot(weights.to(value.dtype), value)
        acc = acc * shrink[:, None] + update
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + (token[:, None] * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & d_mask[None, :],
    )


def paged_attention(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    *,
    scale: float,
    max_rows: int,
    max_visible: int,
    window: int | None = None,
    tree_bits: Tensor | None = None,
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.paged_attention."""
    del max_visible
    _, heads, head_dim = queries.shape
    page_size, kv_heads = key_cache.shape[1:3]
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    requests = q_start.numel() - 1
    pairs = max_rows * (heads // kv_heads)
    if queries.shape[0] == 0 or pairs == 0:
        return out
    queries = _packed_heads(queries)
    block_m = min(64, max(16, triton.next_power_of_2(pairs)))
    _attention_kernel[(requests, kv_heads, triton.cdiv(pairs, block_m))](
        queries,
        key_cache,
        value_cache,
        out,
        page_table,
        q_start,
        visible,
        tree_bits if tree_bits is not None else visible,
        scale,
        queries.stride(0),
        page_table.stride(0),
        window or 0,
        PAGE_SIZE=page_size,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=64,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        HAS_WINDOW=window is not None,
        HAS_TREE=tree_bits is not None,
        EXACT=queries.dtype == torch.float32,
        num_warps=4,
        num_stages=2,
    )
    return out
