"""Attention of training slots without a mask matrix: flash attention over a staircase (see Stairs).

Slots of one rollout stand side by side and rollouts are sorted by anchor, so a tile of queries reads one
contiguous range of context keys and one narrow band of own keys. Tiles inside the range need no mask; those
at its ends compare key indices with two integers a query. The G query heads of a KV head are rows of the
same tile: row m is slot m // G, head m % G of the group.

Backward is two kernels (slot_backward.py): queries that walk over their keys, keys that walk over their
queries (Stairs.bounds says which). No atomics, so the same inputs give the same bits. All of it is two
custom operators, which torch.compile keeps whole.
"""

from typing import Any

import torch
import triton
from torch import Tensor, library

from eyas.kernels.reference.slot_attention import KEY_TILE, Stairs
from eyas.kernels.triton.slot_backward import delta_kernel, keys_kernel, queries_kernel
from eyas.kernels.triton.slot_forward import forward_kernel
from eyas.kernels.triton.slot_tiles import LOG2E, Tiles, launch


def _flat(x: Tensor) -> Tensor:
    """[B, M, heads, dh] whose heads stand side by side; batch and slot strides are free."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def _constants(queries: Tensor, kv_heads: int) -> dict[str, Any]:
    heads, head_dim = queries.shape[-2:]
    return {
        "NUM_HEADS": heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "EXACT": queries.dtype == torch.float32,
    }


@library.custom_op("eyas::stairs_forward", mutates_args=())
def _forward(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    first: Tensor,
    last: Tensor,
    own: Tensor,
    bounds: Tensor,  # noqa: ARG001 - for the backward
    own_bounds: Tensor,  # noqa: ARG001
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, num_slots, heads, head_dim = queries.shape
    kv_heads = context_keys.shape[2]
    group = heads // kv_heads
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(queries.shape[:-1], dtype=torch.float32, device=queries.device)
    inputs = [_flat(x) for x in (queries, context_keys, context_values, own_keys, own_values)]
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    constants = _constants(queries, kv_heads)

    def run(tiles: Tiles) -> None:
        grid = (triton.cdiv(num_slots, tiles.rows // group), kv_heads, batch)
        forward_kernel[grid](
            *inputs,
            first,
            last,
            own,
            out,
            lse,
            num_slots,
            own.shape[1],
            *strides,
            scale * LOG2E,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    if out.numel():
        launch("forward", head_dim, queries.dtype, group, run)
    return out, lse


@_forward.register_fake
def _(queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    return out, torch.empty(queries.shape[:-1], dtype=torch.float32, device=queries.device)


@library.custom_op("eyas::stairs_backward", mutates_args=())
def _backward(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    first: Tensor,
    last: Tensor,
    own: Tensor,
    bounds: Tensor,
    own_bounds: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, num_slots, heads, head_dim = queries.shape
    kv_heads, dtype, device = context_keys.shape[2], queries.dtype, queries.device
    group = heads // kv_heads
    inputs = [_flat(x) for x in (queries, context_keys, context_values, own_keys, own_values)]
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs]
    constants = _constants(queries, kv_heads)
    grad, out = grad.contiguous(), out.contiguous()
    delta = torch.empty_like(lse)
    if not out.numel():
        grads = [x.zero_() for x in grads]
        return grads[0], grads[1], grads[2], grads[3], grads[4]
    delta_kernel[(triton.cdiv(lse.numel(), 32),)](
        out, grad, grad_lse.contiguous(), delta, lse.numel(), constants["HEAD_DIM"], constants["BLOCK_D"], 32
    )

    def run_queries(tiles: Tiles) -> None:
        grid = (triton.cdiv(num_slots, tiles.rows // group), kv_heads, batch)
        queries_kernel[grid](
            *inputs,
            first,
            last,
            own,
            grad,
            lse,
            delta,
            grads[0],
            num_slots,
            own.shape[1],
            *strides,
            scale,
            scale * LOG2E,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def run_keys(tiles: Tiles, *, rolled: bool) -> None:
        at = 3 if rolled else 1
        num_keys = inputs[at].shape[1]
        if not num_keys:
            return
        keys_kernel[(triton.cdiv(num_keys, tiles.keys), kv_heads, batch)](
            inputs[0],
            inputs[at],
            inputs[at + 1],
            own if rolled else first,
            last,
            own_bounds if rolled else bounds,
            grad,
            lse,
            delta,
            grads[at],
            grads[at + 1],
            num_slots,
            num_keys,
            (own_bounds if rolled else bounds).shape[1],
            *strides[:2],
            *strides[2 * at : 2 * at + 4],
            scale,
            scale * LOG2E,
            **constants,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            PER_BOUND=KEY_TILE // tiles.keys,
            OWN=rolled,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    launch("queries", head_dim, dtype, group, run_queries)
    launch("keys", head_dim, dtype, group, lambda tiles: run_keys(tiles, rolled=False))
    launch("keys", head_dim, dtype, group, lambda tiles: run_keys(tiles, rolled=True))
    return grads[0], grads[1], grads[2], grads[3], grads[4]


@_backward.register_fake
def _(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *rest: Any,  # noqa: ARG001
) -> tuple[Tensor, ...]:
    inputs = (queries, context_keys, context_values, own_keys, own_values)
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:-1], *output)
    ctx.scale = inputs[-1]


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(*ctx.saved_tensors, grad, grad_lse, ctx.scale), *(None,) * 6)


_forward.register_autograd(_gradients, setup_context=_save)


def stairs_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    stairs: Stairs,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.slot_attention.stairs_attention; all five tensors of one type."""
    out, lse = _forward(queries, context_keys, context_values, own_keys, own_values, *stairs, scale)
    return out, lse
