"""THE attention rule of training: which slot may attend to which (docs/algorithms/index.md).

A slot is (anchor a, depth k): a guess that stands at RoPE position a + k and whose last real position is
a. With s the document (segment) of a slot, query (a_q, k_q) sees key (a_k, k_k) iff s_q == s_k >= 0 and

    k_k == 0 and a_k <= a_q        real context, up to and including the anchor, or
    a_k == a_q and k_k <= k_q      its own rollout, up to itself.

Depth-0 slots are ordinary causal attention. EAGLE-3's training-time test (causal block plus diagonals)
and P-EAGLE's mask are both exactly this.

Example, anchors 0, 1, 2 at depth 0 and one rollout from anchor 1 (columns: keys in the same order):
    (0,0) (1,0) (2,0) (1,1) (1,2)
    (0,0)   1
    (1,0)   1     1
    (2,0)   1     1     1
    (1,1)   1     1           1
    (1,2)   1     1           1     1
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

KEY_TILE = 128
"""Keys that one entry of Stairs.bounds speaks for."""


def slot_mask(
    anchor_q: Tensor,
    depth_q: Tensor,
    segment_q: Tensor,
    anchor_k: Tensor,
    depth_k: Tensor,
    segment_k: Tensor,
) -> Tensor:
    """Bool [..., Mq, Mk] from int vectors [..., Mq] and [..., Mk].

    Segment -1 is padding: it sees only padding, so that its softmax stays finite.
    """
    a_q, k_q, s_q = anchor_q.unsqueeze(-1), depth_q.unsqueeze(-1), segment_q.unsqueeze(-1)
    a_k, k_k, s_k = anchor_k.unsqueeze(-2), depth_k.unsqueeze(-2), segment_k.unsqueeze(-2)
    context = (k_k == 0) & (a_k <= a_q)
    own = (a_k == a_q) & (k_k <= k_q)
    return (s_q == s_k) & (context | own)


def slot_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Attention of slots: queries [..., Mq, H, dh], keys and values [..., Mk, KV, dh], mask [..., Mq, Mk].

    Returns [..., Mq, H, dh]. Differentiable in all three.
    """
    group = queries.shape[-2] // keys.shape[-2]
    if group > 1:
        # Repeated by hand: with a mask, CUDA's memory-efficient kernel knows no grouped heads, and the
        # fallback would hold every score.
        keys, values = keys.repeat_interleave(group, dim=-2), values.repeat_interleave(group, dim=-2)
    out = functional.scaled_dot_product_attention(
        queries.transpose(-2, -3),
        keys.transpose(-2, -3),
        values.transpose(-2, -3),
        attn_mask=mask.unsqueeze(-3),
        scale=scale,
    )
    return out.transpose(-2, -3)


def causal_segment_mask(segments: Tensor) -> Tensor:
    """Bool [..., n, n]: causal within each packed document; `segments` int [..., n], -1 is padding."""
    position = torch.arange(segments.shape[-1], device=segments.device)
    zero = torch.zeros_like(segments)
    anchors = position.expand_as(segments)
    return slot_mask(anchors, zero, segments, anchors, zero, segments)


class Stairs(NamedTuple):
    """What each of M queries sees: a range of context keys, and a range of its own rollout's keys.

    Queries are R rows of depth 0 in order, then J rollout slots sorted by (anchor, depth), J own keys with
    them. Query m sees context keys first[m] .. last[m] - 1; rollout slot j also sees own keys own[j] .. j.
    An empty range is first == last. Within the R and within the J, first, last and own never fall: that is
    the staircase, and it lets a kernel know by bisection which queries a tile of keys serves.

    Rows x x - y (one document x of two rows, a row between documents, y), rollout (1, 1) (1, 2):
        first  0 0 2 3   0 0
        last   1 2 2 4   2 2        own  0 0
    """

    first: Tensor
    """int32 [B, M]"""
    last: Tensor
    """int32 [B, M]"""
    own: Tensor
    """int32 [B, J]"""
    bounds: Tensor
    """int32 [B, tiles of KEY_TILE context keys, 8], see `key_bounds`"""
    own_bounds: Tensor
    """int32 [B, tiles of KEY_TILE own keys]: the rollout slot after the last one that sees the tile"""


def make_stairs(first: Tensor, last: Tensor, own: Tensor, num_context: int) -> Stairs:
    """Stairs of first, last [B, M] and own [B, J] over `num_context` context keys."""
    first, last, own = (x.to(torch.int32).contiguous() for x in (first, last, own))
    num_rows = first.shape[1] - own.shape[1]
    tiles = torch.arange(KEY_TILE, own.shape[1] + KEY_TILE, KEY_TILE, device=own.device, dtype=torch.int32)
    own_bounds = torch.searchsorted(own, tiles.expand(own.shape[0], -1).contiguous()).to(torch.int32)
    runs = (slice(0, num_rows), slice(num_rows, None))
    bounds = [key_bounds(first[:, run], last[:, run], num_context) + (run.start or 0) for run in runs]
    return Stairs(first, last, own, torch.cat(bounds, dim=-1).contiguous(), own_bounds)


def key_bounds(first: Tensor, last: Tensor, num_context: int) -> Tensor:
    """Which queries of one ascending run see each tile of context keys: int32 [B, tiles, 4].

    (begin, full begin, full end, end): queries begin .. end - 1 see some key of the tile, queries
    full begin .. full end - 1 see every key of it.
    """
    low = torch.arange(0, num_context, KEY_TILE, device=first.device, dtype=torch.int32)
    low = low.expand(first.shape[0], -1).contiguous()
    high = (low + KEY_TILE).clamp(max=num_context)
    first, last = first.contiguous(), last.contiguous()
    begin = torch.searchsorted(last, low, right=True)
    end = torch.maximum(torch.searchsorted(first, high), begin)
    full_begin = torch.minimum(torch.searchsorted(last, high), end)
    full_end = torch.minimum(torch.searchsorted(first, low, right=True), end)
    full_end = torch.maximum(full_end, full_begin)
    return torch.stack((begin, full_begin, full_end, end), dim=-1).to(torch.int32)


def stairs_mask(stairs: Stairs, num_context: int) -> Tensor:
    """Bool [B, M, num_context + J] of the same ranges: context keys, then own keys."""
    device, num_own = stairs.first.device, stairs.own.shape[1]
    index = torch.arange(num_context, device=device)
    context = (stairs.first.unsqueeze(-1) <= index) & (index < stairs.last.unsqueeze(-1))
    place = torch.arange(num_own, device=device)
    own = (stairs.own.unsqueeze(-1) <= place) & (place <= place.unsqueeze(-1))
    own = functional.pad(own, (0, 0, stairs.first.shape[1] - num_own, 0))
    return torch.cat((context, own), dim=-1)


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
    """One softmax over what `stairs` lets each query see, and the logarithm of its denominator.

    queries [B, M, H, dh], context [B, n, KV, dh], own [B, J, KV, dh] (J may be 0) -> out [B, M, H, dh] and
    lse [B, M, H] in float32 (float64 for float64). A query that sees nothing gives 0 and -inf. Both results
    are differentiable, so that parts over other keys can be merged exactly.
    """
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    group = queries.shape[-2] // context_keys.shape[-2]
    keys, values = torch.cat((context_keys, own_keys), 1), torch.cat((context_values, own_values), 1)
    keys, values = (x.to(wide).repeat_interleave(group, dim=-2) for x in (keys, values))
    mask = stairs_mask(stairs, context_keys.shape[1]).unsqueeze(1)
    scores = torch.einsum("bmhd,bkhd->bhmk", queries.to(wide), keys) * scale
    # Finite, so that a query that sees nothing gets no NaN in its gradient.
    scores = scores.masked_fill(~mask, -1e30)
    seeing = mask.any(-1)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhmk,bkhd->bmhd", (scores - lse.unsqueeze(-1)).exp() * mask, values)
    return out.to(queries.dtype), torch.where(seeing, lse, -torch.inf).transpose(1, 2)
