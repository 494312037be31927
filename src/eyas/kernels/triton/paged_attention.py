"""Paged attention that gives a row the same bits whatever else is in the batch.

The rows of a request and the G query heads that share a KV head form the M side of the products: pair m is
row m // G, head m % G of the group. Tiles have one shape for a dtype and head width, whatever the number of
rows, so every row goes through the same instructions.

Keys are cut into chunks of CHUNK at multiples of CHUNK in KV index. A chunk gives every pair a softmax state
(peak, total, acc); states are folded in the order of the chunks. A key that a row doesn't see weighs exactly
0, and a chunk or tile without any is folded without changing a bit, so it doesn't matter who visits it:

    many tiles   one program walks all chunks of its tile and folds as it goes
    few tiles    programs share a tile's chunks and leave states in memory; the last one to arrive folds them

Rounding is spelt out (fma, no contraction), so both ways, and rows of a chain verified together or decoded
one by one, give equal bits. Trees put a row's own keys at other KV indices, so their sums differ in order.

Nothing is read back to the host, so that calls can stand in a CUDA graph; loop bounds come from `visible`,
and `max_visible` only sizes grids and buffers.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from eyas.kernels.settings import settings
from eyas.kernels.triton import paged_attention_kernels as kernels
from eyas.kernels.triton.kv_write import packed_heads
from eyas.kernels.triton.rotary import rotate_and_cache

CHUNK = 256
"""Keys a chunk. A multiple of every tile's; other values give other bits."""
LAST_FOLDS = True
"""Whether the last program of a tile folds its states; otherwise a second kernel does. The same bits."""
FUSE_ROTATION = True
"""Whether few rows are rotated and cached by the attention kernel itself. The same bits."""


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
    memo: dict[Any, Any] | None = None,
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.paged_attention. `memo` keeps counters of this forward."""
    return _attend(
        packed_heads(queries),
        key_cache,
        value_cache,
        page_table,
        q_start,
        visible,
        scale=scale,
        max_rows=max_rows,
        max_visible=max_visible,
        window=window,
        tree_bits=tree_bits,
        sinks=sinks,
        memo=memo,
    )


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
    """See eyas.kernels.reference.paged_attention.rotated_attention; one kernel if a tile holds all rows."""
    kv_heads, head_dim = key_cache.shape[2:]
    pairs = attention["max_rows"] * (num_heads // kv_heads)
    if FUSE_ROTATION and q_norm is None and pairs <= _blocks(qkv.dtype, head_dim)[0]:
        rotation = (cos.contiguous(), sin.contiguous(), slots)
        queries = qkv.view(len(qkv), -1, head_dim)
        return _attend(queries, key_cache, value_cache, page_table, q_start, visible, rotation, **attention)
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


def _blocks(dtype: torch.dtype, head_dim: int) -> tuple[int, int, int]:
    """(pairs, keys, stages) of a tile. Nothing else may decide them: they decide a row's bits."""
    if dtype == torch.float32:
        return 16, 32, 1
    return 64, 64, 3 if head_dim <= 128 else 2


def _num_splits(tiles: int, max_chunks: int, device: torch.device) -> int:
    """Programs that share a tile; one, and no state is stored, where the tiles fill the device."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    return 1 if tiles >= units else min(max_chunks, 4 * units // tiles)


def _attend(
    queries: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    q_start: Tensor,
    visible: Tensor,
    rotation: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    scale: float,
    max_rows: int,
    max_visible: int,
    window: int | None = None,
    tree_bits: Tensor | None = None,
    sinks: Tensor | None = None,
    memo: dict[Any, Any] | None = None,
) -> Tensor:
    """Attend queries [T, H, dh]; with `rotation` (cos, sin, slots) heads of fused rows [T, H + 2 KV, dh]."""
    device, (page_size, kv_heads, head_dim) = queries.device, key_cache.shape[1:]
    heads = queries.shape[1] - (2 * kv_heads if rotation else 0)
    out = torch.empty((queries.shape[0], heads, head_dim), dtype=queries.dtype, device=device)
    requests, pairs = q_start.numel() - 1, max_rows * (heads // kv_heads)
    if out.numel() == 0 or pairs == 0:
        return out
    block_m, block_n, stages = _blocks(queries.dtype, head_dim)
    block_d = max(16, triton.next_power_of_2(head_dim))
    num_keys = page_table.shape[1] * page_size
    bound = min(max_visible + (63 if tree_bits is not None else 0), num_keys)
    max_chunks = max(triton.cdiv(bound, CHUNK), 1)
    tiles_each, kept = triton.cdiv(pairs, block_m), min(pairs, block_m)
    tiles = requests * tiles_each * kv_heads
    splits = _num_splits(tiles, max_chunks, device)
    acc = peak = total = arrivals = out
    if splits > 1:
        states = tiles * max_chunks * kept
        acc = torch.empty(states * block_d, dtype=torch.float32, device=device)
        peak, total = torch.empty((2, states), dtype=torch.float32, device=device).unbind(0)
        arrivals = _arrivals(tiles, device, {} if memo is None else memo)
    cos, sin, slots = rotation or (out, out, visible)
    shape = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "CHUNK": CHUNK}
    shape |= {"BLOCK_M": block_m, "BLOCK_D": block_d, "HAS_WINDOW": window is not None}
    shape |= {"HAS_TREE": tree_bits is not None, "HAS_SINKS": sinks is not None}
    bits = tree_bits if tree_bits is not None else visible
    sinks = sinks if sinks is not None else out
    kernels.attention_kernel[(kv_heads, tiles_each * splits, requests)](
        queries,
        key_cache,
        value_cache,
        out,
        page_table,
        q_start,
        visible,
        bits,
        sinks,
        slots,
        cos,
        sin,
        acc,
        peak,
        total,
        arrivals,
        scale * math.log2(math.e),
        queries.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        window or 0,
        splits,
        max_chunks,
        kept,
        **shape,
        PAGE_SIZE=page_size,
        BLOCK_N=block_n,
        BLOCK_R=triton.next_power_of_2(max_rows) if rotation else 1,
        ROTATE=rotation is not None,
        SPLIT=splits > 1,
        LAST_FOLDS=LAST_FOLDS,
        EXACT=queries.dtype == torch.float32,
        PDL=settings.pdl,
        num_warps=4,
        num_stages=stages,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if settings.pdl else {}),
    )
    if splits > 1 and not LAST_FOLDS:
        pieces = block_m // kernels.PIECE.value
        kernels.fold_kernel[(kv_heads, tiles_each * pieces, requests)](
            out,
            q_start,
            visible,
            bits,
            sinks,
            acc,
            peak,
            total,
            num_keys,
            window or 0,
            max_chunks,
            kept,
            **shape,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def _arrivals(tiles: int, device: torch.device, memo: dict[Any, Any]) -> Tensor:
    """Counters of this forward, at 0 between its calls: kernels leave them so. int32 [>= tiles]."""
    if "arrivals" not in memo or memo["arrivals"].numel() < tiles:
        memo["arrivals"] = torch.zeros(tiles, dtype=torch.int32, device=device)
    arrivals: Tensor = memo["arrivals"]
    return arrivals
