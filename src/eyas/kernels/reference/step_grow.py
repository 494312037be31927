"""Growing a draft tree: the likeliest tokens of a row, the next frontier, and the best N of the pool.

Why these steps, and why parents always come before their children: drafters/tree_pool.

Legend: B requests, W nodes of a frontier, k candidates of each, M pool entries, N drafted nodes, V columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Pool(NamedTuple):
    """Candidates of all depths so far; the tensors are filled from the front."""

    tokens: Tensor
    """int64 [B, M]"""
    scores: Tensor
    """float32 [B, M], cumulative log q"""
    parents: Tensor
    """int64 [B, M], the pool entry above; -1 for the root"""
    likely: Tensor
    """bool [B, M], whether the entry is on the path of most likely children"""


class Frontier(NamedTuple):
    """Nodes that are expanded next, best first."""

    entries: Tensor
    """int64 [B, W], their places in the pool"""
    above: Tensor
    """int64 [B, W], the nodes of the frontier before whose children they are"""
    tokens: Tensor
    """int64 [B, W]"""
    scores: Tensor
    """float32 [B, W]"""
    likely: Tensor
    """bool [B, W], one a request"""
    bits: Tensor
    """int64 [B, W]: bit first_bit + i for the node itself, and the bits of the nodes above it"""


def top_logprobs(logits: Tensor, top_k: int, index_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k likeliest ids int64 [..., k] of logits [..., V], and their log q float32 [..., k].

    `index_map` int64 [V] gives the id that a column stands for.
    """
    best = logits.float().log_softmax(-1).topk(top_k, dim=-1)
    return best.indices if index_map is None else index_map[best.indices], best.values


def grow(
    pool: Pool,
    begin: int,
    frontier: Frontier | None,
    tokens: Tensor,
    log_q: Tensor,
    width: int,
    first_bit: int = 0,
    *,
    children: bool = True,
) -> Frontier:
    """Score a frontier's children and choose the best `width` of them; those or all go into the pool.

    The most likely child of the most likely node comes first whatever its score; of equals the first wins.

    Example, k = 2, log q [-.1, -3] below the root: pool scores -.1 -3; then [-.2, -2] and [-.1, -4] below the
    two: -.3 -2.1 -3.1 -7, of which the best 2 are a frontier with above [0, 0].

    Args:
        pool: written from entry `begin` on.
        begin: see above.
        frontier: W nodes, or None for the root (W = 1).
        tokens: int64 [B, W, k], children in order of falling log q.
        log_q: float32 [B, W, k].
        width: at most W * k.
        first_bit: of the new frontier's own bits.
        children: put all W * k children into the pool in their order; else the chosen, best first.
    """
    num_requests, nodes, top_k = tokens.shape
    scores = log_q.float()
    likely = (torch.arange(top_k, device=tokens.device) == 0).expand(num_requests, nodes, -1)
    parents = tokens.new_full((num_requests, nodes), -1)
    if frontier is not None:
        scores = scores + frontier.scores.unsqueeze(-1)
        likely = likely & frontier.likely.unsqueeze(-1)
        parents = frontier.entries
    everything = Pool(
        tokens.flatten(1), scores.flatten(1), parents.repeat_interleave(top_k, dim=1), likely.flatten(1)
    )
    slots = _rank(everything.scores, everything.likely)[:, :width]
    chosen = Pool(*[field.gather(1, slots) for field in everything])
    kept = everything if children else chosen
    for mine, new in zip(pool, kept, strict=True):
        mine[:, begin : begin + new.shape[1]] = new
    order = torch.arange(width, device=tokens.device)
    above, own = slots // top_k, torch.ones_like(order) << (first_bit + order)
    return Frontier(
        entries=begin + (slots if children else order.expand_as(slots)),
        above=above,
        tokens=chosen.tokens,
        scores=chosen.scores,
        likely=chosen.likely,
        bits=own.expand_as(slots) if frontier is None else frontier.bits.gather(1, above) | own,
    )


def best(pool: Pool, size: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """The N best of the first `size` entries: tokens int64 [B, N], and the row above each, int64 [B, N].

    Rows count from the root, 0; the nodes keep the order of the pool, so parents come before children.
    """
    tokens, scores, parents, likely = (field[:, :size] for field in pool)
    kept = _rank(scores, likely)[:, :num_draft_tokens].sort(dim=1).values
    row = torch.arange(1, num_draft_tokens + 1, device=kept.device).expand_as(kept)
    # Row of each entry; the extra last one is the root's (parent -1).
    rows = kept.new_zeros(kept.shape[0], size + 1).scatter(1, kept, row)
    above = parents.gather(1, kept)
    return tokens.gather(1, kept), rows.gather(1, torch.where(above < 0, size, above))


def _rank(scores: Tensor, likely: Tensor) -> Tensor:
    """Entries int64 [B, M] from the best to the worst; earlier ones first among equals."""
    return scores.masked_fill(likely, torch.inf).sort(dim=1, descending=True, stable=True).indices
