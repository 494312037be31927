"""What the attention kernels load and write besides sums: queries, new rows, keys and values by page.

Legend: N keys from `start` on, R new rows of a request, M pairs, D head width (paged_attention_kernels.py).
"""
# ruff: noqa: ANN001, ANN201, FBT003, SIM108 - arguments get their types at the launch

import triton
import triton.language as tl

from eyas.kernels.triton.rotary import rotated


@triton.jit
def queries(
    query_ptr, cos_ptr, sin_ptr, begin, rows, first, kv_head, row_stride, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """Queries [M, D] of the pairs from `first` on, rotated if they are not yet; all but BLOCK_Q are zeros."""
    pair = first + tl.arange(0, BLOCK_Q)
    token = (begin + pair // GROUP).to(tl.int64)
    there = pair // GROUP < rows
    where = token * row_stride + (kv_head * GROUP + pair % GROUP) * HEAD_DIM
    if ROTATE:
        query = rotated(
            query_ptr, where, token, there, cos_ptr, sin_ptr, cos_ptr, 0.0, False, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    else:
        d = tl.arange(0, BLOCK_D)
        mask = there[:, None] & (d < HEAD_DIM)[None, :]
        query = tl.load(query_ptr + where[:, None] + d[None, :], mask=mask, other=0.0)
    for _ in tl.static_range(3):
        if query.shape[0] < BLOCK_M:
            query = tl.permute(tl.join(query, tl.zeros_like(query)), (2, 0, 1))
            query = tl.reshape(query, (query.shape[0] * query.shape[1], BLOCK_D))
    return query


@triton.jit
def own_rows(
    qkv_ptr, cos_ptr, sin_ptr, token, live, kv_head, row_stride, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotated keys and values [R, D] of one KV head of the request's own rows token [R]."""
    d = tl.arange(0, BLOCK_D)
    where = token * row_stride + (NUM_HEADS + kv_head) * HEAD_DIM
    value_at = (where + NUM_KV_HEADS * HEAD_DIM)[:, None] + d[None, :]
    value = tl.load(qkv_ptr + value_at, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    key = rotated(
        qkv_ptr, where, token, live, cos_ptr, sin_ptr, cos_ptr, 0.0, False, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    return key, value


@triton.jit
def cache_rows(
    key_cache_ptr, value_cache_ptr, slot, kv_head, key, value, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write keys and values [R, D] to the cache at slot [R], but where it is -1.

    Every program that may read such a row writes it: all write the same bits, and nobody has to wait for
    another one.
    """
    d = tl.arange(0, BLOCK_D)
    mask = (slot >= 0)[:, None] & (d < HEAD_DIM)[None, :]
    goal = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(key_cache_ptr + goal, key, mask=mask)
    tl.store(value_cache_ptr + goal, value, mask=mask)
    tl.debug_barrier()


@triton.jit
def write(ptr, x, mask):
    """Write float32 x to ptr where mask, from the registers where it is: sectors of 32 bytes if M is last."""
    x, ptr = tl.broadcast(x, ptr)
    x, mask = tl.broadcast(x, mask)
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r,r",
        [ptr.to(tl.int64, bitcast=True), x, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def pages(pages_ptr, start, last, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages [N] of the keys from `start`, a multiple of N, on."""
    n = tl.arange(0, BLOCK_N)
    if BLOCK_N % PAGE_SIZE == 0:
        number = start // PAGE_SIZE + n // PAGE_SIZE
    else:
        number = (start + n) // PAGE_SIZE
    return tl.load(pages_ptr + number, mask=start + n < last, other=0)


@triton.jit
def places(
    page, kv_head, start, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Where the heads of the keys from `start`, a multiple of COUNT, on begin in the cache, int64 [COUNT]."""
    within = tl.arange(0, COUNT)
    if COUNT % PAGE_SIZE != 0:
        within += start
    # One product of 64 bits; the rest is the same for all units.
    wide: tl.constexpr = PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM
    return page.to(tl.int64) * wide + (within % PAGE_SIZE * NUM_KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def keys_and_values(
    key_cache_ptr, value_cache_ptr, page, kv_head, start, last, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] of the unit that begins at key `start`; both loads are under way together."""
    d = tl.arange(0, BLOCK_D)
    key_index = start + tl.arange(0, BLOCK_N)
    place = places(page, kv_head, start, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N)
    at = place[:, None] + d[None, :]
    mask = (key_index < last)[:, None] & (d < HEAD_DIM)[None, :]
    key = tl.load(key_cache_ptr + at, mask=mask, other=0.0)
    value = tl.load(value_cache_ptr + at, mask=mask, other=0.0)
    return key, value


@triton.jit
def ask_for(
    key_cache_ptr, value_cache_ptr, page, kv_head, start, PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Ask L2 for COUNT keys and values from `start` on, in pages page [COUNT], and don't wait."""
    LINES: tl.constexpr = (HEAD_DIM + 63) // 64
    at = places(page, kv_head, start, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, COUNT)
    for line in tl.static_range(LINES):
        for side in tl.static_range(2):
            address = (value_cache_ptr if side else key_cache_ptr) + at + line * 64
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [address.to(tl.int64, bitcast=True)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def ask_state(
    key_cache_ptr, value_cache_ptr, pages_ptr, visible_ptr, kv_head, start, num_keys, num_cache_pages,
    PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Ask for a state's keys and values that the request's first row sees, before the kernel before ends.

    The table may be about to change: pages are read past L1, clamped, and used for nothing else.
    """
    key_index = start + tl.arange(0, STATE)
    page = tl.load(
        pages_ptr + key_index // PAGE_SIZE, mask=key_index < num_keys, other=0, cache_modifier=".cg"
    )
    seen = tl.load(visible_ptr, cache_modifier=".cg")
    page = tl.where(key_index < seen, tl.minimum(tl.maximum(page, 0), num_cache_pages - 1), 0)
    ask_for(
        key_cache_ptr, value_cache_ptr, page, kv_head, start, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, STATE
    )  # fmt: skip
