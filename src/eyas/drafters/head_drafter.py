"""What the EAGLE-3 and P-EAGLE drafters share: the bound cache, prefill, and how guesses are chosen."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft, ForwardBatch, KVCache, KVLayout
from eyas.core.errors import ConfigError
from eyas.core.tree import DraftTree, TreeBudget
from eyas.core.vocab_map import VocabMap
from eyas.drafters.choose import Uniform, choose_by_sampling, choose_greedily
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.nn.paged import PagedContext, uniform_batch


class HeadDrafter(ABC):
    """Base of the drafters that run a head; subclasses add `propose`.

    With `sample_drafts`, guesses are drawn at the request's temperature and q is kept; otherwise they are
    argmaxes and point masses, which verification accepts with probability p(guess).
    """

    name = "head"

    def __init__(
        self,
        model: Eagle3Model,
        vocab_map: VocabMap,
        num_draft_tokens: int,
        *,
        sample_drafts: bool = False,
        uniform: Uniform | None = None,
    ) -> None:
        if num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens}: a drafter guesses at least 1 token")
        if sample_drafts and uniform is None:
            raise ConfigError("sample_drafts needs a source of random numbers (uniform)")
        self.model, self.vocab_map = model, vocab_map.to(model.fc.weight.device)
        self.tree: DraftTree | TreeBudget = DraftTree.chain(num_draft_tokens)
        self.aux_layers = model.config.aux_layers
        self.kv_layout: KVLayout | None = model.kv_layout
        self.uniform = uniform if sample_drafts else None
        self._cache: KVCache | None = None
        self._max_visible = 0

    @property
    def num_draft_tokens(self) -> int:
        """K; nodes of a tree."""
        return self.tree.num_nodes - 1

    def bind(self, cache: KVCache | None, max_visible: int) -> None:
        """Receive the cache of `kv_layout`; `max_visible` is the engine's context limit."""
        self._cache, self._max_visible = cache, max_visible

    @torch.no_grad()
    def prefill(self, committed: Committed) -> None:
        """Write K and V of known rows; no logits."""
        batch = self._batch(committed, committed.tokens, committed.start, committed.counts)
        self._forward(batch, self._fused(committed).flatten(0, 1))

    @abstractmethod
    def propose(self, committed: Committed) -> Draft:
        """Guess K tokens after the newest committed one."""

    def _fused(self, committed: Committed) -> Tensor:
        """Features through fc, [B, R, D]."""
        assert committed.features is not None, "a head reads the target's hidden states"
        return self.model.fuse(committed.features)

    def _batch(self, committed: Committed, token_ids: Tensor, start: Tensor, counts: Tensor) -> ForwardBatch:
        """Causal rows token_ids [B, rows] from `start`; rows past `counts` write and see nothing."""
        assert self._cache is not None, "bind() comes before the first call"
        return uniform_batch(
            token_ids=token_ids,
            start=start,
            counts=counts,
            page_table=committed.page_table,
            page_size=self._cache.page_size,
            max_position=committed.max_position,
            max_visible=self._max_visible,
        )

    def _forward(self, batch: ForwardBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head on the batch's tokens and hidden [T, D]; returns (normed, feedback) [T, D]."""
        assert self._cache is not None
        context = PagedContext(self._cache, batch)
        out: tuple[Tensor, Tensor] = self.model(
            self.model.embed(batch.token_ids), hidden, batch.positions, context
        )
        return out

    def _choose(self, normed: Tensor, committed: Committed, first_depth: int) -> tuple[Tensor, Tensor | None]:
        """Guesses of normed [B, k, D]: target ids [B, k], and q [B, k, V] where drafts are sampled."""
        logits = self.model.logits(normed)
        if self.uniform is None:
            return choose_greedily(logits, self.vocab_map), None
        return choose_by_sampling(logits, self.vocab_map, committed, first_depth, self.uniform)
