"""Paged attention that gives a row the same bits whatever else is in the batch.

The rows of a request and the G query heads that share a KV head form the M side of the products: pair m is
row m // G, head m % G of the group.

Keys are cut into units at multiples of the unit in KV index. A unit gives every pair a softmax state
(peak, total, acc). The units of a chunk are summed in order, then the chunks. Peaks are rounded up to whole
numbers in base 2, so that states meet through powers of two, and scaling by those is exact: it doesn't
matter when a sum is scaled, only in which order it is summed. A key that a row doesn't see weighs exactly 0.
So all these give equal bits (paged_attention_plan.py says which is taken when):

    few tiles       a program a unit; its state goes to memory, and all are folded from there
    more tiles      a program sums one or several chunks, whose states are folded from memory
    whole prompts   one program walks all keys of its tile and keeps the sums

and rows of a chain verified together or decoded one by one do too. Products have keys, then the head's width,
on the left side and pairs on the right: the instruction is the same for any number of rows. (64 pairs on the
left were slower for up to eight requests.) Trees put a row's own keys at other KV indices: their sums differ
in order.

(A number below 2^-126 of the peak is lost in one order and not in another; it is far below rounding.)

Nothing is read back to the host, so that calls can stand in a CUDA graph; loop bounds come from `visible`,
and `max_visible` only sizes grids and buffers.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from eyas.kernels.triton import paged_attention_kernels as kernels
from eyas.kernels.triton import paged_attention_plan as plans
from eyas.kernels.triton import pdl
from eyas.kernels.triton.kv_write import packed_heads
from eyas.kernels.triton.rotary import rotate_and_cache

FUSE_ROTATION = True
"""Whether few rows are rotated and cached by the attention kernel itself. The same bits."""
PREFETCH = True
"""Whether keys are asked for before the queries, and while the kernel before still runs. The same bits."""


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
    memo: dict[Any, Any] | None = None,  # noqa: ARG001 - the reference's
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.paged_attention. `memo` is of no use."""
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
        uniform=uniform,
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
    memo: dict[Any, Any] | None = None,  # noqa: ARG001 - the reference's
    **attention: Any,
) -> Tensor:
    """See eyas.kernels.reference.paged_attention.rotated_attention; one kernel if a tile holds all rows."""
    if FUSE_ROTATION and q_norm is None and attention["max_rows"] <= plans.MOST_ROTATED:
        head_dim = key_cache.shape[-1]
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
    uniform: bool | None = None,
) -> Tensor:
    """Attend queries [T, H, dh]; with `rotation` (cos, sin, slots) heads of fused rows [T, H + 2 KV, dh]."""
    device, (page_size, kv_heads, head_dim) = queries.device, key_cache.shape[1:]
    heads = queries.shape[1] - (2 * kv_heads if rotation else 0)
    out = torch.empty((queries.shape[0], heads, head_dim), dtype=queries.dtype, device=device)
    requests, pairs = q_start.numel() - 1, max_rows * (heads // kv_heads)
    if out.numel() == 0 or pairs == 0:
        return out
    num_keys = page_table.shape[1] * page_size
    bound = min(max_visible + (63 if tree_bits is not None else 0), num_keys)
    plan = plans.choose(requests, kv_heads, pairs, bound, queries.dtype, head_dim, _processors(device))
    state = plan.state or plans.CHUNK
    max_states = max(triton.cdiv(bound, state), 1)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles_each, kept = triton.cdiv(pairs, plan.block_m), min(pairs, plan.block_m)
    tiles = requests * tiles_each * kv_heads
    acc = peak = total = out
    split = plan.state > 0
    if split:
        states = tiles * max_states * kept
        acc = torch.empty(states * block_d, dtype=torch.float32, device=device)
        peak, total = torch.empty((2, states), dtype=torch.float32, device=device).unbind(0)
    cos, sin, slots = rotation or (out, out, visible)
    shape = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "CHUNK": plans.CHUNK}
    shape |= {"STATE": state, "BLOCK_M": plan.block_m, "BLOCK_D": block_d}
    shape |= {"HAS_WINDOW": window is not None, "HAS_TREE": tree_bits is not None}
    # Every request has max_rows rows at most; packed ones are followed by some that nobody has.
    each = len(queries) == requests * max_rows and uniform is not False
    shape |= {"HAS_SINKS": sinks is not None, "UNIFORM": each}
    bits = tree_bits if tree_bits is not None else visible
    sinks = sinks if sinks is not None else out
    kernels.attention_kernel[(kv_heads, tiles_each * plan.splits, requests)](
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
        scale * math.log2(math.e),
        queries.stride(0),
        page_table.stride(0),
        page_table.shape[1],
        key_cache.shape[0],
        window or 0,
        max_rows,
        plan.splits,
        max_states,
        kept,
        **shape,
        PAGE_SIZE=page_size,
        BLOCK_N=plans.unit(queries.dtype),
        BLOCK_R=triton.next_power_of_2(max_rows) if rotation else 1,
        BLOCK_Q=min(max(triton.next_power_of_2(pairs), 16), plan.block_m),
        ROTATE=rotation is not None,
        SPLIT=split,
        DIRECT=device.type == "cuda",
        EXACT=queries.dtype == torch.float32,
        ASK=_asked(device, window),
        num_warps=plan.warps,
        num_stages=plan.stages,
        enable_fp_fusion=False,
        **pdl.options(small=False),
    )
    if split:
        kernels.fold_kernel[(kv_heads, tiles_each * kept, requests)](
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
            max_rows,
            max_states,
            kept,
            **shape,
            BATCH=plans.folded_together(state, max_states, block_d),
            num_warps=1,
            enable_fp_fusion=False,
            **pdl.options(small=True),
        )
    return out


def _asked(device: torch.device, window: int | None) -> int:
    """What a program asks L2 for (kernels.NOTHING, ...): hints, which the interpreter has no use for."""
    kind: int = kernels.NOTHING.value
    if PREFETCH and device.type == "cuda" and window is None:
        kind = (kernels.BEFORE if pdl.asks() else kernels.UNIT).value
    return kind


def _processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; of the interpreter, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
