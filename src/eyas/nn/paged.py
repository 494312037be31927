"""The engine's attention context: write this forward's K and V into pages, then attend over them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.core.batch import ForwardBatch, KVCache, KVLayout
from eyas.kernels import dispatch


@dataclass(slots=True)
class PagedContext:
    """AttentionContext over a paged cache for the rows of one ForwardBatch (tensors are [T, heads, dh])."""

    cache: KVCache
    batch: ForwardBatch
    memo: dict[Any, Any] = field(default_factory=dict)
    """What attention works out once for all layers; a context serves one forward only."""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Cache K and V of the rows, then attend each row to what it may see."""
        batch = self.batch
        key_cache, value_cache = self.cache.keys[layer], self.cache.values[layer]
        dispatch.write_kv(keys, values, key_cache, value_cache, batch.slots)
        return dispatch.paged_attention(
            queries,
            key_cache,
            value_cache,
            batch.page_table,
            batch.q_start,
            batch.visible,
            scale=scale,
            max_rows=batch.max_rows,
            max_visible=batch.max_visible,
            window=window,
            tree_bits=batch.tree_bits,
            memo=self.memo,
        )


def allocate_cache(
    layout: KVLayout,
    num_pages: int,
    page_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVCache:
    """A zeroed cache; page 0 is the scratch page that rows with slot -1 write to."""
    shape = (num_pages, page_size, layout.num_kv_heads, layout.head_dim)

    def tensors() -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]

    return KVCache(tensors(), tensors(), page_size)


def page_slots(page_table: Tensor, positions: Tensor, page_size: int, valid: Tensor) -> Tensor:
    """Slots of positions [B, R] under page_table [B, P]: page * page_size + offset, -1 where not valid.

    page_size 4, pages [7, 2]: positions [3, 4, 5] -> [7*4+3, 2*4+0, 2*4+1] = [31, 8, 9].
    Positions past the table are not valid.
    """
    page_index = positions // page_size
    inside = valid & (positions >= 0) & (page_index < page_table.shape[1])
    pages = page_table.gather(1, page_index.clamp(0, page_table.shape[1] - 1)).to(torch.int64)
    return torch.where(inside, pages * page_size + positions % page_size, -1)


def uniform_batch(
    *,
    token_ids: Tensor,
    start: Tensor,
    counts: Tensor,
    page_table: Tensor,
    page_size: int,
    max_position: int,
    max_visible: int,
) -> ForwardBatch:
    """A ForwardBatch of R causal rows a request: row j of token_ids [B, R] stands at start [B] + j.

    Rows j >= counts [B] and positions >= max_position are padding: slot -1, visible 0.
    No value is read back to the host, so this can stand in a CUDA graph.
    """
    num_requests, rows = token_ids.shape
    index = torch.arange(rows, device=token_ids.device)
    positions = start[:, None] + index
    valid = (index < counts[:, None]) & (positions < max_position)
    return ForwardBatch(
        token_ids=token_ids.reshape(-1),
        positions=positions.reshape(-1),
        slots=page_slots(page_table, positions, page_size, valid).reshape(-1),
        visible=torch.where(valid, positions + 1, 0).to(torch.int32).reshape(-1),
        q_start=torch.arange(0, num_requests * rows + 1, rows, dtype=torch.int32, device=token_ids.device),
        page_table=page_table,
        max_rows=rows,
        max_visible=max_visible,
        uniform_rows=rows,
    )
