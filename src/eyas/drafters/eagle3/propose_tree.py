"""EAGLE-3 drafting, dynamic tree (EAGLE-2, arXiv 2406.16858, section 4): D forwards, rerank to N nodes.

Forward 1 is the chain's: accepted rows, of which the last guesses the k nodes of depth 1. Forward d + 1
takes the k frontier nodes of depth d (token, the state of the row that guessed it) at the RoPE position of
their depth. They see the committed prefix, the frontier nodes above them and themselves: their K and V stand
behind the newest committed row in the order of the forwards, k a depth, and tree_bits name those on the
path. The next round overwrites them.

Example, k 2, D 3, newest committed row at 6: frontier of depth 1 at KV indices 7, 8 (position 7), of depth 2
at 9, 10 (position 8). Node at 10 below the node at 7: bits 0b1001.
"""

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft
from eyas.core.errors import ConfigError
from eyas.core.tree import MAX_ROWS, TreeBudget
from eyas.core.vocab_map import VocabMap
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.eagle3.propose import Eagle3Drafter
from eyas.drafters.tree_pool import Frontier, TreePool
from eyas.kernels import dispatch_step
from eyas.nn.tree_paged import tree_batch


class Eagle3TreeDrafter(Eagle3Drafter):
    """Runs an Eagle3Model; drafts are point masses."""

    def __init__(self, model: Eagle3Model, vocab_map: VocabMap, tree: TreeBudget) -> None:
        super().__init__(model, vocab_map, tree.depth)
        if tree.num_scratch_rows > MAX_ROWS:
            raise ConfigError(
                f"tree {tree}: EAGLE-3 expands {tree.num_scratch_rows} nodes, and {MAX_ROWS} are the most: "
                "lower depth or top_k"
            )
        self.tree = self.budget = tree

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess a tree; see eyas.drafters.base.Drafter."""
        top_k = self.budget.top_k
        hidden = self._newest_row(committed).unsqueeze(1)  # [B, 1, D]: the root is the frontier
        capacity = top_k + (self.budget.depth - 1) * top_k**2
        pool = TreePool(hidden.shape[0], capacity, hidden.device, children=True)
        frontier: Frontier | None = None
        for depth in range(self.budget.depth):
            tokens, log_q = self._children(hidden)
            frontier = pool.grow(frontier, tokens, log_q, top_k, depth * top_k)
            if depth < self.budget.depth - 1:
                feedback = self._feedback(hidden)
                feedback = feedback.gather(1, frontier.above.unsqueeze(-1).expand(-1, -1, feedback.shape[-1]))
                hidden = self._expand(committed, frontier.tokens, feedback, frontier.bits, depth)
        drafts, parents = pool.best(self.budget.num_draft_tokens)
        return Draft(drafts, parents=parents)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The k most likely target ids below rows [B, W, D], int64 [B, W, k], and their log q."""
        logits = self.model.logits(self.model.norm(hidden))
        return dispatch_step.top_logprobs(logits, self.budget.top_k, self._index_map)

    def _expand(
        self, committed: Committed, tokens: Tensor, feedback: Tensor, bits: Tensor, depth: int
    ) -> Tensor:
        """Run the frontier of depth + 1: tokens [B, k] beside feedback [B, k, D] -> hidden [B, k, D]."""
        assert self._cache is not None, "bind() comes before the first call"
        batch = tree_batch(
            token_ids=tokens,
            depths=torch.full_like(tokens, depth),
            bits=bits,
            start=committed.start + committed.counts,
            first=depth * self.budget.top_k,
            page_table=committed.page_table,
            page_size=self._cache.page_size,
            max_position=committed.max_position,
            max_visible=self._max_visible,
        )
        rows = self._run(batch, tokens, committed.counts, feedback.flatten(0, 1))
        return rows.view_as(feedback)
