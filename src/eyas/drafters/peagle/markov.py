"""Markov correction: slot k's logits also hear which token slot k - 1 chose (DSpark, arXiv 2607.05147).

P-EAGLE's depths are marginals: each is guessed without knowing the guess before it, so a slot that could go
two ways makes its successors waver between both. With a table T [Vd, R] and an output matrix U [Vd, R], R
small,

    logits_k = lm_head(normed_k) + U T[token_{k-1}]        for k >= 1; depth 0 reads its token as an input

The layers still run once for all depths; only this product of R numbers is made one depth after the other.
In training the token before is the one that stands in the data; one outside the draft vocabulary corrects
nothing. U starts as zeros, so a head begins as it was without the correction.
"""

import torch
from torch import Tensor, nn

from eyas.core.batch import Committed, Draft
from eyas.core.vocab_map import VocabMap
from eyas.drafters.choose import Uniform, choose_by_sampling


class Markov(nn.Module):
    """The correction's weights: T with rows of norm about 1 (`reset`), U of zeros."""

    def __init__(self, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(draft_vocab_size, rank))
        self.out = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.reset(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw T anew from a CPU generator; U back to zeros."""
        noise = torch.randn(self.table.shape, generator=generator)
        self.table.copy_(noise / self.table.shape[1] ** 0.5)
        self.out.zero_()

    def rows(self, previous: Tensor) -> Tensor:
        """T's rows of draft ids int64 [...]: [..., R]; zeros where there is none (-1)."""
        return self.table[previous.clamp(min=0)] * (previous >= 0).unsqueeze(-1).to(self.table.dtype)

    def joined(self, normed: Tensor, head_weight: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The corrected logits as one product: (normed [..., D + R], weight [Vd, D + R]).

        previous int64 [...] are draft ids, -1 for no correction. What the fused loss takes instead of
        normed [..., D] and lm_head's weight [Vd, D].
        """
        rows = self.rows(previous).to(normed.dtype)
        return torch.cat((normed, rows), -1), torch.cat((head_weight, self.out), -1)

    def draft(
        self, logits: Tensor, committed: Committed, vocab_map: VocabMap, uniform: Uniform | None
    ) -> Draft:
        """Choose depth by depth from uncorrected logits [B, K, Vd]: argmaxes, or draws with `uniform`.

        q of a depth is the distribution that it was drawn from, given the token drawn before it.
        """
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        chosen: Tensor | None = None
        for depth in range(logits.shape[1]):
            current = logits[:, depth : depth + 1]
            if chosen is not None:
                current = current + self.table[chosen] @ self.out.T
            if uniform is None:
                chosen = current.argmax(-1)
                tokens.append(vocab_map.to_target(chosen))
                continue
            drawn, q = choose_by_sampling(current, vocab_map, committed, depth, uniform)
            chosen = torch.searchsorted(vocab_map.target_ids, drawn)
            tokens.append(drawn)
            probs.append(q)
        return Draft(torch.cat(tokens, 1), torch.cat(probs, 1) if probs else None)
