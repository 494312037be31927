"""P-EAGLE drafting, tree: one forward, then the N most likely paths over its D marginals (tree_policy)."""

import torch

from eyas.core.batch import Committed, Draft
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.core.vocab_map import VocabMap
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.drafters.peagle.tree_policy import best_first


class PEagleTreeDrafter(PEagleDrafter):
    """Runs a PEagleModel with `tree.depth` guesses a forward; drafts are point masses."""

    def __init__(self, model: PEagleModel, vocab_map: VocabMap, tree: TreeBudget) -> None:
        super().__init__(model, vocab_map, tree.depth)
        if model.markov is not None:
            raise ConfigError("a head with markov_rank drafts chains; leave the tree out")
        self.tree = self.budget = tree

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess a tree; see eyas.drafters.base.Drafter."""
        rows = self._guess_rows(committed, self.budget.depth)
        log_q = self.model.logits(self.model.norm(rows)).float().log_softmax(-1)
        best = log_q.topk(self.budget.top_k, dim=-1)
        tokens, parents = best_first(
            self.vocab_map.to_target(best.indices), best.values, self.budget.num_draft_tokens
        )
        return Draft(tokens, parents=parents)
