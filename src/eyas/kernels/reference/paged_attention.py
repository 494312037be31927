"""Attention over a paged KV cache; chains, prefill chunks, padding and trees by one rule.

Row t of request b attends to
    KV indices [max(0, visible[t] - window), visible[t])                     the committed prefix, and
    the request's own rows j with bit j of tree_bits[t] set (trees only)     its ancestors and itself.
A row that sees nothing (visible 0, padding) gives zeros.

Example, one request, 5 cached tokens, 3 chain rows, window None:
    row 0 visible 6 -> keys 0..5      row 1 visible 7 -> keys 0..6      row 2 visible 8 -> keys 0..7
The same as a tree (root, two children): visible 5 for all, bits 001, 011, 101; the rows' own keys are
read from KV indices 5 + j, where write_kv has put them.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write rows keys, values [T, KV, dh] to `slots` [T] of caches [pages, page_size, KV, dh].

    Rows with slot -1 go to slot 0 of the scratch page 0, which nobody reads.
    """
    where = slots.clamp_min(0)
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, where, keys.to(key_cache.dtype))
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, where, values.to(value_cache.dtype))


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
    """Attend queries [T, H, dh] to their requests' cached keys and values; returns [T, H, dh].

    Grouped heads: query head h reads KV head h // (H / KV). `max_rows` and `max_visible` are bounds.
    Every row's own K and V must be in the cache already (write_kv first).
    """
    del max_rows
    out = torch.zeros_like(queries)
    page_size = key_cache.shape[1]
    starts = q_start.tolist()
    seen = visible.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        longest = max(seen[begin:end], default=0)
        extra = end - begin if tree_bits is not None else 0
        length = min(longest, max_visible) + extra
        if longest == 0:
            continue
        pages = page_table[request, : -(-length // page_size)]
        keys, values = _gather(key_cache, pages, length), _gather(value_cache, pages, length)
        index = torch.arange(length, device=queries.device)
        limit = visible[begin:end, None]
        allowed = index < limit
        if window is not None:
            allowed &= index >= limit - window
        if tree_bits is not None:
            # Own rows stand at KV indices visible + j, the same `visible` for all rows of a tree.
            own = index - limit
            bit = (tree_bits[begin:end, None] >> own.clamp(0, 62)) & 1
            allowed |= (own >= 0) & (own < extra) & bit.bool()
        heads = functional.scaled_dot_product_attention(
            queries[begin:end].transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=allowed,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        rows = heads.squeeze(0).transpose(0, 1)
        out[begin:end] = torch.where(allowed.any(-1)[:, None, None], rows, 0)
    return out


def _gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` cached rows of one request, [length, KV, dh]; a view if one page holds them."""
    if pages.numel() == 1:
        return cache[int(pages[0]), :length]
    return cache[pages].flatten(0, 1)[:length]
