"""P-EAGLE drafting, tree: one forward, then the N most likely paths over its D marginals (tree_policy).

A head with a correction by the token before (markov.py) is read without it here: its depths are proper
marginals where the correction was trained on top of a finished head (head.train=markov).
"""

import torch

from eyas.core.batch import Committed, Draft
from eyas.core.tree import TreeBudget
from eyas.core.vocab_map import VocabMap
from eyas.drafters.peagle.model import PEagleModel
from eyas.drafters.peagle.propose import PEagleDrafter
from eyas.drafters.peagle.tree_policy import best_first
from eyas.kernels import dispatch_step


class PEagleTreeDrafter(PEagleDrafter):
    """Runs a PEagleModel with `tree.depth` guesses a forward; drafts are point masses."""

    def __init__(self, model: PEagleModel, vocab_map: VocabMap, tree: TreeBudget) -> None:
        super().__init__(model, vocab_map, tree.depth)
        self._correction = None
        self.tree = self.budget = tree

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess a tree; see eyas.drafters.base.Drafter."""
        rows = self._guess_rows(committed, self.budget.depth)
        logits = self.model.logits(self.model.norm(rows))
        tokens, log_q = dispatch_step.top_logprobs(logits, self.budget.top_k, self._index_map)
        drafts, parents = best_first(tokens, log_q, self.budget.num_draft_tokens)
        return Draft(drafts, parents=parents)
