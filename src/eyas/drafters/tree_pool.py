"""Growing a draft tree on the device: candidates by cumulative log q, and the best N (EAGLE-2, section 4).

    expand   every node of a frontier offers its top-k children; all of them enter the pool; the best become
             the next frontier
    rerank   the N best of the pool are the tree

A child's log q is at most 0, so no child scores more than its parent, and the pool lists parents before
children: sorting by score, earlier entries first among equals, keeps every parent of a node that is kept.

The path of most likely children (what a chain would draft) is always kept, whatever its score: then no step
can accept less than the chain of the same depth. Its last nodes are the cheapest ones to spend otherwise,
but they are few, and a drafter's q is seldom calibrated so far down.

All shapes are static; nothing is read back to the host. Legend: B requests, W nodes of a frontier, k
candidates of each, M pool entries, N drafted nodes.

Example, k = 2, N = 3, log q of [-.1, -3] below the root, [-.2, -2] below its first child and [-.1, -4] below
its second: pool scores -.1 -3 | -.3 -2.1 -3.1 -7, tree = entries 0, 2, 3 with parents (rows) 0, 1, 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Frontier(NamedTuple):
    """Nodes that are expanded next."""

    entries: Tensor
    """int64 [B, W], their places in the pool"""
    slots: Tensor
    """int64 [B, W], their places among the W_before * k candidates that they were chosen from"""
    scores: Tensor
    """float32 [B, W], cumulative log q"""
    likely: Tensor
    """bool [B, W], whether the node is on the most likely path (one a request)"""


class TreePool:
    """Candidates of all depths so far. Made for one call of `propose`."""

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._likely: list[Tensor] = []
        self._size = 0

    def grow(self, frontier: Frontier | None, tokens: Tensor, log_q: Tensor, width: int) -> Frontier:
        """Add the children of a frontier (None: of the root) and choose the next frontier of `width` nodes.

        Args:
            frontier: W nodes, or None with W = 1.
            tokens: int64 [B, W, k], children in order of falling log q.
            log_q: float [B, W, k].
            width: at most W * k.
        """
        num_requests, nodes, top_k = tokens.shape
        scores, first = log_q.float(), torch.arange(top_k, device=tokens.device) == 0
        parents = tokens.new_full((num_requests, nodes), -1)
        likely = first.expand(num_requests, nodes, -1)
        if frontier is not None:
            scores = scores + frontier.scores.unsqueeze(-1)
            parents = frontier.entries
            likely = likely & frontier.likely.unsqueeze(-1)
        scores, likely = scores.flatten(1), likely.flatten(1)
        slots = _rank(scores, likely)[:, :width]
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores)
        self._parents.append(parents.repeat_interleave(top_k, dim=1))
        self._likely.append(likely)
        begin, self._size = self._size, self._size + nodes * top_k
        return Frontier(slots + begin, slots, scores.gather(1, slots), likely.gather(1, slots))

    def best(self, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
        """The tree: tokens int64 [B, N] and the row above each, int64 [B, N] (core/batch.Draft.parents)."""
        scores, likely = torch.cat(self._scores, dim=1), torch.cat(self._likely, dim=1)
        assert num_draft_tokens <= scores.shape[1], "TreeBudget bounds the number of nodes"
        # In the order of the pool, so that parents come before children.
        kept = _rank(scores, likely)[:, :num_draft_tokens].sort(dim=1).values
        row = torch.arange(1, num_draft_tokens + 1, device=kept.device).expand_as(kept)
        # Row of each entry; the extra last one is the root's (parent -1).
        rows = kept.new_zeros(kept.shape[0], scores.shape[1] + 1).scatter(1, kept, row)
        above = torch.cat(self._parents, dim=1).gather(1, kept)
        parents = rows.gather(1, torch.where(above < 0, scores.shape[1], above))
        return torch.cat(self._tokens, dim=1).gather(1, kept), parents


def _rank(scores: Tensor, likely: Tensor) -> Tensor:
    """Entries int64 [B, M] from the best to the worst; earlier ones first among equals."""
    return scores.masked_fill(likely, torch.inf).sort(dim=1, descending=True, stable=True).indices
