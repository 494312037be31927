"""Growing a draft tree in a few launches. Ranks are counts of better entries, without a sort.

Legend as in the reference twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.step_grow import Frontier, Pool

_COLUMNS = 2048
_TILE = 8192
"""Comparisons that a program holds at a time."""


@triton.jit
def _top_part_kernel(  # noqa: ANN202
    logits_ptr,  # noqa: ANN001
    values_ptr,  # noqa: ANN001
    columns_ptr,  # noqa: ANN001
    peak_ptr,  # noqa: ANN001
    total_ptr,  # noqa: ANN001
    row_stride,  # noqa: ANN001
    size,  # noqa: ANN001
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = row * tl.num_programs(1) + part
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + column, mask=column < size, other=float("-inf")).to(
        tl.float32
    )
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peak_ptr + out, peak)
    tl.store(total_ptr + out, tl.sum(tl.exp(x - base), 0))
    for place in range(TOP_K):
        value = tl.max(x, 0)
        # The first of equals; a row of NaN has none and must still name a column.
        winner = tl.minimum(tl.min(tl.where(x == value, column, 2147483647), 0), size - 1)
        tl.store(values_ptr + out * TOP_K + place, value)
        tl.store(columns_ptr + out * TOP_K + place, winner)
        x = tl.where(column == winner, float("-inf"), x)


@triton.jit
def _top_merge_kernel(  # noqa: ANN202
    values_ptr,  # noqa: ANN001
    columns_ptr,  # noqa: ANN001
    peak_ptr,  # noqa: ANN001
    total_ptr,  # noqa: ANN001
    map_ptr,  # noqa: ANN001
    ids_ptr,  # noqa: ANN001
    log_q_ptr,  # noqa: ANN001
    num_parts,  # noqa: ANN001
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    peaks = tl.load(peak_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    totals = tl.load(total_ptr + row * num_parts + part, mask=part < num_parts, other=0.0)
    peak = tl.max(peaks, 0)
    normaliser = peak + tl.log(tl.sum(totals * tl.exp(peaks - peak), 0))
    entry = tl.arange(0, BLOCK)
    inside = entry < num_parts * TOP_K
    values = tl.load(values_ptr + row * num_parts * TOP_K + entry, mask=inside, other=float("-inf"))
    for place in range(TOP_K):
        value = tl.max(values, 0)
        # Parts come in the order of the columns, so the first of equals is the lowest column.
        winner = tl.minimum(tl.min(tl.where(values == value, entry, 2147483647), 0), num_parts * TOP_K - 1)
        token = tl.load(columns_ptr + row * num_parts * TOP_K + winner).to(tl.int64)
        if HAS_MAP:
            token = tl.load(map_ptr + token)
        tl.store(ids_ptr + row * TOP_K + place, token)
        tl.store(log_q_ptr + row * TOP_K + place, value - normaliser)
        values = tl.where(entry == winner, float("-inf"), values)


def top_logprobs(logits: Tensor, top_k: int, index_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_grow.top_logprobs."""
    lead, size = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, size)
    rows, parts = flat.shape[0], triton.cdiv(size, _COLUMNS)
    values = torch.empty(rows, parts, top_k, dtype=torch.float32, device=logits.device)
    columns = torch.empty(rows, parts, top_k, dtype=torch.int32, device=logits.device)
    peaks = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(peaks)
    _top_part_kernel[(rows, parts)](
        flat, values, columns, peaks, totals, flat.stride(0), size, TOP_K=top_k, BLOCK=_COLUMNS, num_warps=4
    )
    ids = torch.empty(*lead, top_k, dtype=torch.int64, device=logits.device)
    log_q = torch.empty(*lead, top_k, dtype=torch.float32, device=logits.device)
    _top_merge_kernel[(rows,)](
        values,
        columns,
        peaks,
        totals,
        ids if index_map is None else index_map,
        ids,
        log_q,
        parts,
        TOP_K=top_k,
        HAS_MAP=index_map is not None,
        BLOCK_PARTS=triton.next_power_of_2(max(2, parts)),
        BLOCK=triton.next_power_of_2(max(2, parts * top_k)),
        num_warps=4,
    )
    return ids, log_q


@triton.jit
def _keys(scores, likely):  # noqa: ANN001, ANN202
    """What entries are ranked by; a NaN would leave ranks that nobody has, and so places unwritten."""
    scores = tl.where(scores == scores, scores, float("-inf"))  # noqa: PLR0124 - false for NaN alone
    return tl.where(likely, float("inf"), scores)


@triton.jit
def _grow_kernel(  # noqa: ANN202
    tokens_ptr,  # noqa: ANN001
    log_q_ptr,  # noqa: ANN001
    front_entries_ptr,  # noqa: ANN001
    front_scores_ptr,  # noqa: ANN001
    front_likely_ptr,  # noqa: ANN001
    front_bits_ptr,  # noqa: ANN001
    pool_tokens_ptr,  # noqa: ANN001
    pool_scores_ptr,  # noqa: ANN001
    pool_parents_ptr,  # noqa: ANN001
    pool_likely_ptr,  # noqa: ANN001
    entries_out,  # noqa: ANN001
    above_out,  # noqa: ANN001
    tokens_out,  # noqa: ANN001
    scores_out,  # noqa: ANN001
    likely_out,  # noqa: ANN001
    bits_out,  # noqa: ANN001
    pool_size,  # noqa: ANN001
    begin,  # noqa: ANN001
    first_bit,  # noqa: ANN001
    NODES: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_ROOT: tl.constexpr,
    CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = NODES * TOP_K
    child = tl.arange(0, BLOCK)
    inside = child < COUNT
    node = child // TOP_K
    log_q = log_q_ptr + request * COUNT
    scores = tl.load(log_q + child, mask=inside, other=float("-inf"))
    likely = inside & (child % TOP_K == 0)
    parents = tl.full([BLOCK], -1, tl.int64)
    if not IS_ROOT:
        scores += tl.load(front_scores_ptr + request * NODES + node, mask=inside, other=0.0)
        likely &= tl.load(front_likely_ptr + request * NODES + node, mask=inside, other=0) > 0
        parents = tl.load(front_entries_ptr + request * NODES + node, mask=inside, other=-1)
    keys = _keys(scores, likely)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNT, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < COUNT
        other_keys = tl.load(log_q + other, mask=there, other=float("-inf"))
        other_likely = there & (other % TOP_K == 0)
        if not IS_ROOT:
            where = request * NODES + other // TOP_K
            other_keys += tl.load(front_scores_ptr + where, mask=there, other=0.0)
            other_likely &= tl.load(front_likely_ptr + where, mask=there, other=0) > 0
        other_keys = _keys(other_keys, other_likely)
        equal_before = (other_keys[None, :] == keys[:, None]) & (other[None, :] < child[:, None])
        better = there[None, :] & ((other_keys[None, :] > keys[:, None]) | equal_before)
        rank += tl.sum(better.to(tl.int32), 1)
    tokens = tl.load(tokens_ptr + request * COUNT + child, mask=inside, other=0)
    chosen = inside & (rank < WIDTH)
    if CHILDREN:
        place = child.to(tl.int64) + begin
        into_pool = inside
    else:
        place = rank.to(tl.int64) + begin
        into_pool = chosen
    pooled = request * pool_size + place
    tl.store(pool_tokens_ptr + pooled, tokens, mask=into_pool)
    tl.store(pool_scores_ptr + pooled, scores, mask=into_pool)
    tl.store(pool_parents_ptr + pooled, parents, mask=into_pool)
    tl.store(pool_likely_ptr + pooled, likely.to(tl.uint8), mask=into_pool)
    bits = tl.full([BLOCK], 1, tl.int64) << (first_bit + tl.minimum(rank, WIDTH)).to(tl.int64)
    if not IS_ROOT:
        bits |= tl.load(front_bits_ptr + request * NODES + node, mask=inside, other=0)
    out = request * WIDTH + rank
    tl.store(entries_out + out, place, mask=chosen)
    tl.store(above_out + out, node.to(tl.int64), mask=chosen)
    tl.store(tokens_out + out, tokens, mask=chosen)
    tl.store(scores_out + out, scores, mask=chosen)
    tl.store(likely_out + out, likely.to(tl.uint8), mask=chosen)
    tl.store(bits_out + out, bits, mask=chosen)


def grow(
    pool: Pool,
    begin: int,
    frontier: Frontier | None,
    tokens: Tensor,
    log_q: Tensor,
    width: int,
    first_bit: int = 0,
    *,
    children: bool = True,
) -> Frontier:
    """See eyas.kernels.reference.step_grow.grow."""
    num_requests, nodes, top_k = tokens.shape
    entries, above, taken, bits = (tokens.new_empty(num_requests, width) for _ in range(4))
    scores = torch.empty(num_requests, width, dtype=torch.float32, device=tokens.device)
    likely = torch.empty(num_requests, width, dtype=torch.bool, device=tokens.device)
    new = Frontier(entries, above, taken, scores, likely, bits)
    old = new if frontier is None else frontier
    block = triton.next_power_of_2(max(2, nodes * top_k))
    _grow_kernel[(num_requests,)](
        tokens.contiguous(),
        log_q.contiguous(),
        old.entries,
        old.scores,
        old.likely.view(torch.uint8),
        old.bits,
        pool.tokens,
        pool.scores,
        pool.parents,
        pool.likely.view(torch.uint8),
        new.entries,
        new.above,
        new.tokens,
        new.scores,
        new.likely.view(torch.uint8),
        new.bits,
        pool.tokens.shape[1],
        begin,
        first_bit,
        NODES=nodes,
        TOP_K=top_k,
        WIDTH=width,
        IS_ROOT=frontier is None,
        CHILDREN=children,
        BLOCK=block,
        CHUNK=max(2, min(64, _TILE // block)),
        num_warps=4 if block <= 1024 else 8,
    )
    return new


@triton.jit
def _kept_kernel(  # noqa: ANN202
    scores_ptr,  # noqa: ANN001
    likely_ptr,  # noqa: ANN001
    kept_ptr,  # noqa: ANN001
    pool_size,  # noqa: ANN001
    size,  # noqa: ANN001
    num_drafts,  # noqa: ANN001
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    scores, likely = scores_ptr + request * pool_size, likely_ptr + request * pool_size
    keys = tl.load(scores + entry, mask=inside, other=float("-inf"))
    keys = _keys(keys, tl.load(likely + entry, mask=inside, other=0) > 0)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < size
        other_keys = tl.load(scores + other, mask=there, other=float("-inf"))
        other_keys = _keys(other_keys, tl.load(likely + other, mask=there, other=0) > 0)
        equal_before = (other_keys[None, :] == keys[:, None]) & (other[None, :] < entry[:, None])
        better = there[None, :] & ((other_keys[None, :] > keys[:, None]) | equal_before)
        rank += tl.sum(better.to(tl.int32), 1)
    tl.store(kept_ptr + request * size + entry, (rank < num_drafts).to(tl.int32), mask=inside)


@triton.jit
def _rows_of_kept_kernel(  # noqa: ANN202
    kept_ptr,  # noqa: ANN001
    tokens_ptr,  # noqa: ANN001
    parents_ptr,  # noqa: ANN001
    tokens_out,  # noqa: ANN001
    parents_out,  # noqa: ANN001
    pool_size,  # noqa: ANN001
    size,  # noqa: ANN001
    num_drafts,  # noqa: ANN001
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    kept = tl.load(kept_ptr + request * size + entry, mask=inside, other=0)
    parents = tl.load(parents_ptr + request * pool_size + entry, mask=inside, other=-1)
    # How many kept entries stand before this one, and before its parent.
    place = tl.zeros([BLOCK], tl.int32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_kept = tl.load(kept_ptr + request * size + other, mask=other < size, other=0)
        place += tl.sum(tl.where(other[None, :] < entry[:, None], other_kept[None, :], 0), 1)
        above += tl.sum(tl.where(other[None, :] < parents[:, None], other_kept[None, :], 0), 1)
    out = request * num_drafts + place
    mask = inside & (kept > 0)
    tokens = tl.load(tokens_ptr + request * pool_size + entry, mask=inside, other=0)
    tl.store(tokens_out + out, tokens, mask=mask)
    tl.store(parents_out + out, tl.where(parents < 0, 0, above + 1).to(tl.int64), mask=mask)


def best(pool: Pool, size: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.step_grow.best."""
    num_requests, pool_size = pool.tokens.shape
    kept = torch.empty(num_requests, size, dtype=torch.int32, device=pool.tokens.device)
    tokens, parents = (pool.tokens.new_empty(num_requests, num_draft_tokens) for _ in range(2))
    grid = (num_requests, triton.cdiv(size, 128))
    sizes = (pool_size, size, num_draft_tokens)
    likely = pool.likely.view(torch.uint8)
    _kept_kernel[grid](pool.scores, likely, kept, *sizes, BLOCK=128, CHUNK=64, num_warps=4)
    _rows_of_kept_kernel[grid](
        kept, pool.tokens, pool.parents, tokens, parents, *sizes, BLOCK=128, CHUNK=64, num_warps=4
    )
    return tokens, parents
