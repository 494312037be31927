"""What the EAGLE-3 and P-EAGLE drafters share: the bound cache, prefill, and how guesses are chosen."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft, ForwardBatch, KVCache, KVLayout
from eyas.core.errors import ConfigError
from eyas.core.tree import DraftTree, TreeBudget
from eyas.core.vocab_map import VocabMap
from eyas.drafters.choose import Uniform, choose_by_sampling
from eyas.drafters.eagle3.model import Eagle3Model
from eyas.kernels import dispatch_step
from eyas.kernels.reference.step_expand import MaskRow
from eyas.nn.paged import PagedContext, uniform_batch

FEW_ROWS = 16
"""Up to here a product takes as long as for one row: the narrowest tile that reads weights at full speed."""
PACKED_ROWS = 128
"""Past these, rows that count are packed to the front and products leave out blocks of the others."""


class HeadDrafter(ABC):
    """Base of the drafters that run a head; subclasses add `propose`.

    With `sample_drafts`, guesses are drawn at the request's temperature and q is kept; otherwise they are
    argmaxes and point masses, which verification accepts with probability p(guess).
    """

    name = "head"
    reads_history = False

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
        self._index_map = None if vocab_map.is_identity else self.vocab_map.target_ids
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
        self._run(batch, committed.tokens, committed.counts, self._fused(committed), self._mask())

    @abstractmethod
    def propose(self, committed: Committed) -> Draft:
        """Guess K tokens after the newest committed one."""

    def _mask(self) -> MaskRow | None:
        """What rows past the committed ones carry; None where nothing reads them."""
        return None

    def _fused(self, committed: Committed) -> Tensor:
        """Features through fc, [B * R, D]."""
        assert committed.features is not None, "a head reads the target's hidden states"
        return self.model.fuse(committed.features).flatten(0, 1)

    def _batch(
        self,
        committed: Committed,
        token_ids: Tensor,
        start: Tensor,
        counts: Tensor,
        *,
        packed: bool = False,
    ) -> ForwardBatch:
        """Causal rows token_ids [B, rows] from `start`; rows past `counts` write and see nothing."""
        assert self._cache is not None, "bind() comes before the first call"
        return uniform_batch(
            token_ids=token_ids,
            start=start,
            counts=counts,
            page_table=committed.page_table,
            page_size=self._cache.page_size,
            max_position=committed.max_position,
            max_visible=committed.max_visible or self._max_visible,
            packed=packed,
        )

    def _run(
        self,
        batch: ForwardBatch,
        tokens: Tensor,
        counts: Tensor,
        hidden: Tensor,
        mask: MaskRow | None = None,
        extra: int = 0,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run the head on tokens [B, R] beside hidden [B * R, D]: [T, D] before the final norm.

        `keep` picks the rows that are wanted.
        """
        assert self._cache is not None
        inputs, residual = self.model.expand(tokens, counts, hidden, mask, extra)
        return self.model.run(inputs, residual, batch.positions, PagedContext(self._cache, batch), keep)

    def _run_newest(self, committed: Committed, mask: MaskRow | None = None, extra: int = 0) -> Tensor:
        """Run the head over the committed rows and `extra` more of each request, which `mask` fills.

        Returns the newest committed row and those after it, [B, 1 + extra, D]. The last layer multiplies no
        other rows, unless all are so few that it takes as long.
        """
        num_requests, rows = committed.tokens.shape
        # Only its shape is read: the tokens are laid out by `expand`.
        shape = committed.tokens.new_empty(num_requests, rows + extra)
        packed = _packs(shape)
        counts = committed.counts + extra if extra else committed.counts
        batch = self._batch(committed, shape, committed.start, counts, packed=packed)
        q_start = batch.q_start if packed else None

        def newest(rows: Tensor) -> Tensor:
            return dispatch_step.newest(rows, committed.counts, 1 + extra, q_start)

        few = batch.token_ids.numel() <= FEW_ROWS
        keep = None if few else newest
        if packed:
            hidden = self._run_packed(batch, committed, mask, extra, keep)
        else:
            fused = self._fused(committed)
            hidden = self._run(batch, committed.tokens, committed.counts, fused, mask, extra, keep)
        return newest(hidden) if few else hidden

    def _run_packed(
        self,
        batch: ForwardBatch,
        committed: Committed,
        mask: MaskRow | None,
        extra: int,
        keep: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """As `_run`, without the rows of rejected drafts, from the features on; the same bits."""
        assert self._cache is not None
        assert committed.features is not None, "a head reads the target's hidden states"
        features, starts = dispatch_step.pack(committed.features.flatten(0, 1), committed.counts)
        fused = self.model.fuse(features, starts[-1:])
        tokens, counts = committed.tokens, committed.counts
        inputs, residual = self.model.expand(tokens, counts, fused, mask, extra, packed=True)
        context = PagedContext(self._cache, batch)
        return self.model.run(inputs, residual, batch.positions, context, keep, batch.q_start[-1:])

    def _feedback(self, hidden: Tensor) -> Tensor:
        """The next depth's hidden state [..., D] of this depth's rows."""
        return self.model.norm(hidden) if self.model.config.norm_output else hidden

    def _choose(self, hidden: Tensor, committed: Committed, first_depth: int) -> tuple[Tensor, Tensor | None]:
        """Guesses of hidden [B, k, D]: target ids [B, k], and q [B, k, V] where drafts are sampled."""
        if self.uniform is None:
            return self.model.guess(hidden, self._index_map), None
        logits = self.model.logits(self.model.norm(hidden))
        return choose_by_sampling(logits, self.vocab_map, committed, first_depth, self.uniform)


def _packs(rows: Tensor) -> bool:
    """Whether rows [B, n] are worth packing: where blocks of rows can be left out."""
    return rows.is_cuda and rows.numel() > PACKED_ROWS
