"""The engine's attention context: write this forward's K and V into pages, then attend over them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.core.batch import ForwardBatch, KVCache, KVLayout
from eyas.kernels import dispatch
from eyas.nn.norm import RMSNorm


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
        key_cache, value_cache = self.cache.keys[layer], self.cache.values[layer]
        dispatch.write_kv(keys, values, key_cache, value_cache, self.batch.slots)
        batch = self.batch
        return dispatch.paged_attention(
            queries,
            key_cache,
            value_cache,
            batch.page_table,
            batch.q_start,
            batch.visible,
            scale=scale,
            window=window,
            **self._options(),
        )

    def attend_rows(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_heads: int,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Norm, rotate, cache and attend fused rows qkv [T, (H + 2 KV) dh], as the projection gives them."""
        batch = self.batch
        return dispatch.rotated_attention(
            qkv,
            cos,
            sin,
            self.cache.keys[layer],
            self.cache.values[layer],
            batch.slots,
            batch.page_table,
            batch.q_start,
            batch.visible,
            num_heads=num_heads,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            scale=scale,
            window=window,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """What attention of every layer is told about the batch."""
        batch = self.batch
        return {
            "max_rows": batch.max_rows,
            "max_visible": batch.max_visible,
            "tree_bits": batch.tree_bits,
            "uniform": False if batch.packed else None,
            "memo": self.memo,
        }


def allocate_cache(
    layout: KVLayout,
    num_pages: int,
    page_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> KVCache:
    """A zeroed cache; page 0 is the scratch page that rows with slot -1 write to."""
    shape = (layout.num_layers, num_pages, page_size, layout.num_kv_heads, layout.head_dim)
    # Layers at even distances: one launch can go over all of them (kernels/triton/step_move).
    keys, values = (list(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(2))
    return KVCache(keys, values, page_size)


def uniform_batch(
    *,
    token_ids: Tensor,
    start: Tensor,
    counts: Tensor,
    page_table: Tensor,
    page_size: int,
    max_position: int,
    max_visible: int,
    packed: bool = False,
) -> ForwardBatch:
    """A ForwardBatch of R causal rows a request: row j of token_ids [B, R] stands at start [B] + j.

    Rows j >= counts [B] and positions >= max_position are padding: slot -1, visible 0. `packed` puts rows
    j >= counts of all requests after the others (kernels/reference/rows); token_ids are left as they are.
    No value is read back to the host, so this can stand in a CUDA graph.
    """
    each = token_ids.shape[1]
    rows = dispatch.chain_rows(start, counts, page_table, each, page_size, max_position, packed=packed)
    return ForwardBatch(
        token_ids=token_ids.reshape(-1),
        positions=rows.positions,
        slots=rows.slots,
        visible=rows.visible,
        q_start=rows.q_start,
        page_table=page_table,
        max_rows=each,
        max_visible=max_visible,
        uniform_rows=None if packed else each,
        packed=packed,
    )
