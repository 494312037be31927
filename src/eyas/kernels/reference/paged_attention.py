"""Attention over a paged KV cache; chains, prefill chunks, padding and trees by one rule.

Row t of request b attends to
    KV indices [max(0, visible[t] - window), visible[t])                     the committed prefix, and
    the KV indices visible[t] + j with bit j of tree_bits[t] set, j < 63     its path in a tree (trees only).
In a tree the window counts positions along the row's path of n bits: its prefix starts at
visible[t] + n - window. The path itself must fit into the window.
A row that sees nothing (visible 0 and no bits: padding) gives zeros.

Example, one request, 5 cached tokens, 3 chain rows, window None:
    row 0 visible 6 -> keys 0..5      row 1 visible 7 -> keys 0..6      row 2 visible 8 -> keys 0..7
The same as a tree (root, two children): visible 5 for all, bits 001, 011, 101; the rows' own keys are
read from KV indices 5 + j, where write_kv has put them.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.reference.rotary import rotate_and_cache

MAX_BITS = 63
"""Bits of a row's tree set; the sign bit is not one of them."""


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
    sinks: Tensor | None = None,
    uniform: bool | None = None,
    memo: dict[Any, Any] | None = None,
) -> Tensor:
    """Attend queries [T, H, dh] to their requests' cached keys and values; returns [T, H, dh].

    Grouped heads: query head h reads KV head h // (H / KV). `max_rows` and `max_visible` are bounds.
    `sinks` [H], finite, are logits of a key whose value is zero: they join the softmax's sum.
    `uniform` False: there may be rows after the last request's, which are padding.
    Every row's own K and V must be in the cache already (write_kv first). A caller whose layers share one
    batch hands in the same `memo` (empty at first), so that masks are made once and not in every layer.
    """
    del max_rows, uniform
    memo = {} if memo is None else memo
    if window not in memo:
        memo[window] = _plan(page_table, q_start, visible, max_visible, window, tree_bits, key_cache.shape[1])
    out = torch.zeros_like(queries)
    for request in memo[window]:
        keys, values = _gather(key_cache, request), _gather(value_cache, request)
        mask = None if request.mask is None else request.mask.to(queries.dtype)
        if sinks is not None:
            keys, values, mask = _with_sink(keys, values, mask, sinks.to(queries.dtype), request)
        heads = functional.scaled_dot_product_attention(
            queries[request.begin : request.end].transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        rows = heads.squeeze(0).transpose(0, 1)
        if request.seeing is not None:
            rows = torch.where(request.seeing, rows, 0)
        out[request.begin : request.end] = rows
    return out


def rotated_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    **attention: Any,
) -> Tensor:
    """rotary.rotate_and_cache of fused rows qkv, then paged_attention of the queries: [T, H, dh].

    `attention` are the named arguments of paged_attention.
    """
    queries = rotate_and_cache(
        qkv,
        cos,
        sin,
        key_cache,
        value_cache,
        slots,
        num_heads=num_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )
    return paged_attention(queries, key_cache, value_cache, page_table, q_start, visible, **attention)


@dataclass(slots=True)
class _Request:
    """Which rows, keys and pairs of both one request's attention is about."""

    begin: int
    end: int
    pages: Tensor
    first_page: int | None
    """Where the pages follow each other in the cache, the first one; then nothing is copied."""
    length: int
    mask: Tensor | None
    """float32 [rows, length], 0 or -inf; None where every row sees every key."""
    seeing: Tensor | None
    """Bool [rows, 1, 1], rows that see anything; None where all do."""


def _plan(
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    max_visible: int,
    window: int | None,
    tree_bits: Tensor | None,
    page_size: int,
) -> list[_Request]:
    """Requests that have a row which sees something."""
    requests = []
    seen = visible.tolist()
    bits = None if tree_bits is None else tree_bits.tolist()
    for index, (begin, end) in enumerate(itertools.pairwise(q_start.tolist())):
        longest = min(max(seen[begin:end], default=0), max_visible)
        if bits is not None:
            longest += max(bits[begin:end], default=0).bit_length()
        length = min(longest, page_table.shape[1] * page_size)
        if length == 0:
            continue
        pages = page_table[index, : -(-length // page_size)]
        numbers = pages.tolist()
        follow = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        allowed = _allowed(
            visible[begin:end], length, window, None if tree_bits is None else tree_bits[begin:end]
        )
        seeing = allowed.any(-1)
        mask = torch.zeros_like(allowed, dtype=torch.float32).masked_fill_(~allowed, -torch.inf)
        requests.append(
            _Request(
                begin=begin,
                end=end,
                pages=pages,
                first_page=numbers[0] if follow else None,
                length=length,
                mask=None if bool(allowed.all()) else mask,
                seeing=None if bool(seeing.all()) else seeing[:, None, None],
            )
        )
    return requests


def _allowed(visible: Tensor, length: int, window: int | None, tree_bits: Tensor | None) -> Tensor:
    """Bool [rows, length]: which KV index each row of one request sees."""
    index, limit = torch.arange(length, device=visible.device), visible[:, None]
    allowed = index < limit
    if tree_bits is None:
        return allowed if window is None else allowed & (index >= limit - window)
    bits = (tree_bits[:, None] >> torch.arange(MAX_BITS, device=visible.device)) & 1
    if window is not None:
        allowed &= index >= limit + bits.sum(1, keepdim=True) - window
    own = index - limit
    return allowed | ((own >= 0) & (own < MAX_BITS) & bits.gather(1, own.clamp(0, MAX_BITS - 1)).bool())


def _gather(cache: Tensor, request: _Request) -> Tensor:
    """The first `length` cached rows of one request, [length, KV, dh]; a view where the pages allow it."""
    if request.first_page is None:
        return cache[request.pages].flatten(0, 1)[: request.length]
    begin = request.first_page * cache.shape[1]
    return cache.view(-1, *cache.shape[2:])[begin : begin + request.length]


def _with_sink(
    keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor, request: _Request
) -> tuple[Tensor, Tensor, Tensor]:
    """One more key, zeros like its value, whose logit in head h is sinks[h]: mask [H, rows, length + 1]."""
    keys, values = (functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (keys, values))
    shape = (len(sinks), request.end - request.begin, request.length)
    mask = sinks.new_zeros(shape) if mask is None else mask.expand(shape)
    return keys, values, torch.cat((mask, sinks[:, None, None].expand(*shape[:2], 1)), dim=-1)
