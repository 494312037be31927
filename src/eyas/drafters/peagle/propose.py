"""P-EAGLE drafting, chain (arXiv 2602.01469, section 2): K guesses in one forward.

Each request gets R + K - 1 rows: its accepted rows, then K - 1 mask rows at the positions after them, then
padding. One causal rule serves all: mask row k sees the committed rows and the mask rows before it, which
is the slot (anchor = last accepted row, depth k) of training. Mask rows write K and V for each other
only; the next round starts at the position of the first one and overwrites them.

Where rows are many, padding comes after all requests' rows and is not computed (HeadDrafter).

Example: start 5, counts 2, R 4, K 3 (6 rows; logits are taken from the marked ones):
    position   5        6        7      8      9        10
    row        (a, f5)  (b, f6)  mask   mask   padding  padding
    guesses             token 8  9      10
"""

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft, KVCache
from eyas.core.vocab_map import VocabMap
from eyas.drafters.choose import Uniform
from eyas.drafters.head_drafter import HeadDrafter
from eyas.drafters.peagle.derived import Derived
from eyas.drafters.peagle.markov import MarkovTables, sample_chain
from eyas.drafters.peagle.model import PEagleModel
from eyas.kernels import dispatch_step
from eyas.kernels.reference.step_expand import MaskRow


class PEagleDrafter(HeadDrafter):
    """Runs a PEagleModel with any K; see HeadDrafter for the arguments."""

    name = "peagle"

    def __init__(
        self,
        model: PEagleModel,
        vocab_map: VocabMap,
        num_draft_tokens: int,
        *,
        sample_drafts: bool = False,
        uniform: Uniform | None = None,
    ) -> None:
        super().__init__(model, vocab_map, num_draft_tokens, sample_drafts=sample_drafts, uniform=uniform)
        self._peagle = model
        mask_weights = [model.mask_hidden, model.fc.weight]
        mask_weights += [] if model.depth_encoding is None else [model.depth_encoding]
        mask_weights += [] if model.input_norm is None else list(model.input_norm.parameters())
        mask_weights += [] if model.fc_norm is None else list(model.fc_norm.parameters())
        self._fused_mask = Derived(mask_weights, lambda: (model.fused_mask(),))
        self._correction: Derived | None = None
        if model.markov is not None:
            weights = [model.embed_weight, model.mask_embedding, model.lm_head.weight]
            target_ids = self.vocab_map.target_ids
            self._correction = Derived(
                [*weights, *model.markov.parameters()], lambda: model.markov_tables(target_ids)
            )

    def bind(self, cache: KVCache | None, max_visible: int) -> None:
        """Receive the cache; fuse the shared mask state and make the correction's tables once."""
        super().bind(cache, max_visible)
        self._fused_mask.get()
        if self._correction is not None:
            self._correction.get()

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess K tokens; see eyas.drafters.base.Drafter."""
        hidden = self._guess_rows(committed, committed.wanted(self.num_draft_tokens))
        if self._correction is not None:
            return self._propose_corrected(hidden, committed, MarkovTables(*self._correction.get()))
        guesses, probs = self._choose(hidden, committed, 0)
        return Draft(guesses, probs)

    def _propose_corrected(self, hidden: Tensor, committed: Committed, tables: MarkovTables) -> Draft:
        """Guess from hidden [B, K, D] depth by depth: each row hears the guess before it (markov.py)."""
        markov = self._peagle.markov
        assert markov is not None
        normed = self.model.norm(hidden)
        logits, pre = self.model.logits(normed), markov.pre(normed)
        if self.uniform is None:
            return Draft(dispatch_step.markov_guess(logits, pre, *tables, self._index_map, silu=markov.silu))
        return sample_chain(logits, pre, tables, self.vocab_map, committed, self.uniform, silu=markov.silu)

    def _guess_rows(self, committed: Committed, num_guesses: int) -> Tensor:
        """The forward: rows [B, num_guesses, D] before the final norm, of which row k guesses depth k + 1."""
        return self._run_newest(committed, self._mask(), num_guesses - 1)

    def _mask(self) -> MaskRow:
        model = self._peagle
        return MaskRow(model.mask_token_id, model.mask_embedding, *self._fused_mask.get())
