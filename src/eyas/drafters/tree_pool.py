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

import torch
from torch import Tensor

from eyas.kernels import dispatch_step
from eyas.kernels.reference.step_grow import Frontier, Pool

__all__ = ["Frontier", "TreePool"]


class TreePool:
    """Candidates of all depths so far. Made for one call of `propose`.

    Args:
        num_requests: B.
        capacity: M, entries that will be put in at most.
        device: of the tensors.
        children: keep all children of a frontier; else only those that become the next one, which is enough
            where frontiers are as wide as the tree.
    """

    def __init__(self, num_requests: int, capacity: int, device: torch.device, *, children: bool) -> None:
        shape = (num_requests, capacity)
        self._pool = Pool(
            tokens=torch.empty(shape, dtype=torch.int64, device=device),
            scores=torch.empty(shape, dtype=torch.float32, device=device),
            parents=torch.empty(shape, dtype=torch.int64, device=device),
            likely=torch.empty(shape, dtype=torch.bool, device=device),
        )
        self._children, self._size = children, 0

    def grow(
        self, frontier: Frontier | None, tokens: Tensor, log_q: Tensor, width: int, first_bit: int = 0
    ) -> Frontier:
        """Add the children of a frontier (None: of the root) and choose the next frontier of `width` nodes.

        tokens int64 and log_q float32 [B, W, k], children in order of falling log q; `first_bit` is that of
        the new frontier's own bits (Frontier.bits).
        """
        begin = self._size
        self._size += tokens.shape[1] * tokens.shape[2] if self._children else width
        assert self._size <= self._pool.tokens.shape[1], "the pool was made for fewer entries"
        return dispatch_step.grow(
            self._pool, begin, frontier, tokens, log_q, width, first_bit, children=self._children
        )

    def best(self, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
        """The tree: tokens int64 [B, N] and the row above each, int64 [B, N] (core/batch.Draft.parents)."""
        assert num_draft_tokens <= self._size, "TreeBudget bounds the number of nodes"
        return dispatch_step.best(self._pool, self._size, num_draft_tokens)
