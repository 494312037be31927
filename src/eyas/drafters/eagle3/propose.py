"""EAGLE-3 drafting, chain (arXiv 2503.01840, section 3.1): K forwards, each fed the one before.

Forward 1 takes the accepted rows: next tokens beside the target's own features. Its K and V are what
stays in the cache. The last accepted row's output gives guess 1; forward i then takes one row, (guess i-1,
that row's output), at the next position. The K and V of those rows are overwritten by the next round.

Example: start 5, counts 2, K 3. Forward 1: rows at 5, 6 (later rows are padding); row 6 guesses token 8.
Forward 2: row 7 guesses token 9. Forward 3: row 8 guesses token 10. The next round starts at 5 + 2 = 7.
"""

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft
from eyas.drafters.head_drafter import HeadDrafter


class Eagle3Drafter(HeadDrafter):
    """Runs an Eagle3Model; see HeadDrafter for the arguments."""

    name = "eagle3"

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess K tokens; see eyas.drafters.base.Drafter."""
        hidden = self._newest_row(committed)
        num_guesses, one = committed.wanted(self.num_draft_tokens), torch.ones_like(committed.counts)
        # Positions of the single rows, a depth each.
        position = torch.arange(num_guesses, device=one.device)[:, None] + (
            committed.start + committed.counts
        )
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for depth in range(num_guesses):
            if depth > 0:
                batch = self._batch(committed, tokens[-1], position[depth - 1], one)
                hidden = self._run(batch, tokens[-1], one, self._feedback(hidden))
            guess, q = self._choose(hidden.unsqueeze(1), committed, depth)
            tokens.append(guess)
            if q is not None:
                probs.append(q)
        return Draft(torch.cat(tokens, dim=1), torch.cat(probs, dim=1) if probs else None)

    def _newest_row(self, committed: Committed) -> Tensor:
        """Forward 1: extend the cache by the accepted rows; the last one of each, [B, D]."""
        return self._run_newest(committed).squeeze(1)
