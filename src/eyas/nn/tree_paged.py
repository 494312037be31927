"""Rows of draft trees in a paged cache, and the move of accepted ones to where the next step expects them.

While a tree is verified its rows stand at the KV indices start, start + 1, ... in the order of the rows,
whatever their depths; RoPE positions follow the depths. Afterwards only a path is kept, and index must equal
position again.

Example, start 5, rows root, a, b, and c below a (depths 0 1 1 2), path root - b accepted:
    KV index   5     6  7  8           position 5 6 6 7
    move       row at index 7 (b) -> index 6; the next step overwrites 7 and 8
"""

import torch
from torch import Tensor

from eyas.core.batch import ForwardBatch, KVCache
from eyas.kernels import dispatch
from eyas.nn.paged import page_slots


def tree_batch(
    *,
    token_ids: Tensor,
    depths: Tensor,
    bits: Tensor,
    start: Tensor,
    first: int,
    page_table: Tensor,
    page_size: int,
    max_position: int,
    max_visible: int,
) -> ForwardBatch:
    """A ForwardBatch of R tree rows a request: row j is written at KV index start + first + j.

    Rows see the committed prefix [0, start) and the indices start + i with bit i set. Rows whose index is
    max_position or more are padding: slot -1, nothing visible. Nothing is read back to the host.

    Args:
        token_ids: int64 [B, R].
        depths: int64 [B, R]; a row's RoPE position is start + depth.
        bits: int64 [B, R].
        start: int64 [B], committed KV indices before the tree.
        first: index of the first row in the tree's own space (0 but for a drafter's later forwards).
        page_table: int32 [B, P].
        page_size: tokens a page.
        max_position: no page from here on.
        max_visible: bound on `start`.
    """
    num_requests, rows = token_ids.shape
    index = start[:, None] + first + torch.arange(rows, device=token_ids.device)
    valid = index < max_position
    return ForwardBatch(
        token_ids=token_ids.reshape(-1),
        positions=(start[:, None] + depths).reshape(-1),
        slots=page_slots(page_table, index, page_size, valid).reshape(-1),
        visible=torch.where(valid, start[:, None], 0).to(torch.int32).reshape(-1),
        q_start=torch.arange(0, num_requests * rows + 1, rows, dtype=torch.int32, device=token_ids.device),
        page_table=page_table,
        max_rows=rows,
        max_visible=max_visible,
        uniform_rows=rows,
        tree_bits=torch.where(valid, bits, 0).reshape(-1),
    )


def move_rows(
    cache: KVCache, page_table: Tensor, start: Tensor, nodes: Tensor, counts: Tensor, max_position: int
) -> None:
    """Copy K and V of the accepted nodes to consecutive KV indices, on every layer.

    All of them are read before any is written, so that a path may overlap its destination.

    Args:
        cache: the target's.
        page_table: int32 [B, P].
        start: int64 [B], KV index of the root.
        nodes: int64 [B, D + 1], row of the accepted node at depth d; rows d >= counts are not moved.
        counts: int64 [B].
        max_position: no page from here on.
    """
    depth = torch.arange(nodes.shape[1], device=nodes.device)
    goal = start[:, None] + depth
    moving = (depth < counts[:, None]) & (nodes != depth) & (goal < max_position)
    source = page_slots(page_table, start[:, None] + nodes, cache.page_size, moving).reshape(-1).clamp_min(0)
    target = page_slots(page_table, goal, cache.page_size, moving).reshape(-1)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        old_keys = keys.view(-1, *keys.shape[2:])[source]
        old_values = values.view(-1, *values.shape[2:])[source]
        dispatch.write_kv(old_keys, old_values, keys, values, target)
