"""One head that drafts in several shapes: how many drafts a step has says which.

An engine may draft a wide tree for one request, a narrow one for eight and a short chain for sixty-four
(engine/calibrated). All shapes share the head's cache, which holds committed tokens alone when a step begins,
so any may follow any. To the engine all are trees of one bound: a chain is the tree in which every node has
one child, and places that a shape does not fill are no drafts.

Example, trees of 6 and 12 nodes beside chains: 12 drafts are the second tree, 5 a chain. Of a chain of 2 the
12 places are tokens [d1, d2, -1, ..], parents [0, 1, 0, ..].
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from eyas.core.batch import Committed, Draft, KVCache, KVLayout
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter


class ByNumberDrafter:
    """Trees by their number of nodes, and chains of every other number.

    Args:
        trees: drafters of trees, no two with as many nodes.
        chain: drafts chains up to its own K; None where no step asks for one.
    """

    reads_history = False

    def __init__(self, trees: Sequence[Drafter], chain: Drafter | None) -> None:
        parts = [*trees, *([chain] if chain is not None else [])]
        self._parts, self._chain = parts, chain
        self._trees = {drafter.num_draft_tokens: drafter for drafter in trees}
        assert len(self._trees) == len(trees), "how many drafts there are must tell the trees apart"
        self.name, self.aux_layers = parts[0].name, parts[0].aux_layers
        self.kv_layout: KVLayout | None = parts[0].kv_layout
        budgets = [drafter.tree for drafter in trees if isinstance(drafter.tree, TreeBudget)]
        self.tree = TreeBudget(
            depth=max(drafter.tree.depth for drafter in parts),
            top_k=max(budget.top_k for budget in budgets),
            num_draft_tokens=max(drafter.num_draft_tokens for drafter in parts),
        )

    @property
    def num_draft_tokens(self) -> int:
        """Places for drafts, as many as the largest shape has."""
        return self.tree.num_draft_tokens

    def bind(self, cache: KVCache | None, max_visible: int) -> None:
        """Receive the cache; all shapes write to it."""
        for drafter in self._parts:
            drafter.bind(cache, max_visible)

    def prefill(self, committed: Committed) -> None:
        """Extend the cache by known rows."""
        self._parts[0].prefill(committed)

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess in the shape that `committed.num_guesses` names; see eyas.drafters.base.Drafter."""
        wanted = committed.wanted(self.num_draft_tokens)
        drafter = self._trees.get(wanted, self._chain)
        assert drafter is not None, f"no shape has {wanted} drafts"
        draft = drafter.propose(committed)
        num_drafts = draft.tokens.shape[1]
        parents = draft.parents
        if parents is None:
            parents = torch.arange(num_drafts, device=draft.tokens.device).expand_as(draft.tokens)
        missing = self.num_draft_tokens - num_drafts
        return Draft(
            functional.pad(draft.tokens, (0, missing), value=-1),
            parents=functional.pad(parents, (0, missing)),
        )
