"""Move accepted tree nodes to consecutive KV indices, on every layer of a cache."""

import torch
from torch import Tensor

from eyas.kernels.reference.kv_write import write_kv
from eyas.kernels.reference.rows import page_slots


def move_nodes(
    keys: list[Tensor],
    values: list[Tensor],
    page_table: Tensor,
    start: Tensor,
    nodes: Tensor,
    counts: Tensor,
    max_position: int,
) -> None:
    """Copy K and V from index start + nodes[d] to start + d.

    All of them are read before any is written, so that a path may overlap its destination.

    Example, start 5, nodes [0, 2, 2], counts 2: index 7 goes to index 6.

    Args:
        keys: a layer each, [num_pages, page_size, kv_heads, head_dim].
        values: the same.
        page_table: int32 [B, P].
        start: int64 [B], KV index of the root.
        nodes: int64 [B, D + 1], row of the accepted node at depth d, ascending; d >= counts is not moved.
        counts: int64 [B].
        max_position: no page from here on.
    """
    page_size = keys[0].shape[1]
    depth = torch.arange(nodes.shape[1], device=nodes.device)
    goal = start[:, None] + depth
    moving = (depth < counts[:, None]) & (nodes != depth) & (goal < max_position)
    source = page_slots(page_table, start[:, None] + nodes, page_size, moving).reshape(-1).clamp_min(0)
    target = page_slots(page_table, goal, page_size, moving).reshape(-1)
    for key_cache, value_cache in zip(keys, values, strict=True):
        old_keys = key_cache.view(-1, *key_cache.shape[2:])[source]
        old_values = value_cache.view(-1, *value_cache.shape[2:])[source]
        write_kv(old_keys, old_values, key_cache, value_cache, target)
