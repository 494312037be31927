"""Speculative sampling with a separate small model (arXiv 2211.17192, 2302.01318).

The small model is a complete language model: the token at position p belongs at its KV index p, beside
nothing of the target's. `Committed` is shifted by one, so row j of it is the token at start + 1 + j; the
token at `start` comes from the history. Each call runs those R + 1 rows, which keeps the cache complete
whatever was accepted, also for a prompt of one token: before a call it holds tokens 0 .. start - 1 at
least, after it 0 .. start + counts. The last of them guesses token start + counts + 1; K - 1 single rows
follow.

Example: start 5, counts 2: rows (token 5, token 6, token 7) at 5, 6, 7; row 7 guesses token 8; the row of
guess 8 stands at KV index 8 until the next round, which starts at 7, overwrites it.
"""

from typing import Protocol

import torch
from torch import Tensor

from eyas.core.batch import Committed, Draft, ForwardBatch, KVCache, KVLayout
from eyas.core.errors import ConfigError, HeadMismatchError
from eyas.core.tree import DraftTree
from eyas.core.vocab_map import VocabMap
from eyas.drafters.choose import Uniform, choose_by_sampling, choose_greedily
from eyas.nn.attention import AttentionContext
from eyas.nn.paged import PagedContext, uniform_batch

# Families pad their vocabularies differently by model size; a larger difference is another tokenizer.
MAX_PADDING = 1024


class LanguageModel(Protocol):
    """What a small model offers; eyas.targets.decoder.Decoder is one."""

    @property
    def kv_layout(self) -> KVLayout:
        """What it caches per token."""
        ...

    def __call__(
        self, token_ids: Tensor, positions: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids and positions [T] -> (hidden [T, D] after the final norm, captured states or None)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., D] -> [..., V]."""
        ...


class SmallModelDrafter:
    """Greedy guesses of a small model, or draws from it with `sample_drafts`.

    `small_vocab_size` and `vocab_size` may differ by padding; ids that only one side has are never guessed.
    """

    name = "small_model"
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: LanguageModel,
        num_draft_tokens: int,
        *,
        small_vocab_size: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        sample_drafts: bool = False,
        uniform: Uniform | None = None,
    ) -> None:
        if num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens}: a drafter guesses at least 1 token")
        if sample_drafts and uniform is None:
            raise ConfigError("sample_drafts needs a source of random numbers (uniform)")
        if abs(small_vocab_size - vocab_size) > MAX_PADDING:
            raise HeadMismatchError(
                f"the small model has another vocabulary: {small_vocab_size} tokens, the target "
                f"{vocab_size}. It must come from the target's own family (same tokenizer)."
            )
        self.model, self._small_vocab_size = model, small_vocab_size
        self.tree = DraftTree.chain(num_draft_tokens)
        self.kv_layout: KVLayout | None = model.kv_layout
        self.uniform = uniform if sample_drafts else None
        shared = torch.arange(min(small_vocab_size, vocab_size), device=device)
        self.vocab_map = VocabMap(shared, vocab_size)
        self._cache: KVCache | None = None
        self._max_visible = 0

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self.tree.num_nodes - 1

    def bind(self, cache: KVCache | None, max_visible: int) -> None:
        """Receive the cache of `kv_layout`; `max_visible` is the engine's context limit."""
        self._cache, self._max_visible = cache, max_visible

    @torch.no_grad()
    def prefill(self, committed: Committed) -> None:
        """Write K and V of the known tokens."""
        self._extend(committed)

    @torch.no_grad()
    def propose(self, committed: Committed) -> Draft:
        """Guess K tokens; see eyas.drafters.base.Drafter."""
        num_requests, rows = committed.tokens.shape
        hidden = self._extend(committed)
        device = committed.tokens.device
        # counts + 1 of the R + 1 rows are real: the last real one is row `counts`.
        hidden = hidden[torch.arange(num_requests, device=device) * (rows + 1) + committed.counts]
        position = committed.start + committed.counts
        one = torch.ones_like(committed.counts)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for depth in range(committed.wanted(self.num_draft_tokens)):
            if depth > 0:
                hidden = self._run(self._batch(committed, tokens[-1], position + depth, one))
            logits = self.model.logits(hidden)[:, None, : self.vocab_map.draft_vocab_size]
            if self.uniform is None:
                tokens.append(choose_greedily(logits, self.vocab_map))
            else:
                guess, q = choose_by_sampling(logits, self.vocab_map, committed, depth, self.uniform)
                tokens.append(guess)
                probs.append(q)
        return Draft(torch.cat(tokens, dim=1), torch.cat(probs, dim=1) if probs else None)

    def _extend(self, committed: Committed) -> Tensor:
        """Run tokens start .. start + counts; returns hidden [B * (R + 1), D]."""
        at_start = committed.history.gather(1, committed.start[:, None])
        token_ids = torch.cat((at_start, committed.tokens), dim=1)
        # An id that only the target has (padding of the vocabulary) must not index past the small table.
        token_ids = token_ids.clamp_max(self._small_vocab_size - 1)
        return self._run(self._batch(committed, token_ids, committed.start, committed.counts + 1))

    def _run(self, batch: ForwardBatch) -> Tensor:
        assert self._cache is not None, "bind() comes before the first call"
        hidden, _ = self.model(batch.token_ids, batch.positions, PagedContext(self._cache, batch))
        return hidden

    def _batch(self, committed: Committed, token_ids: Tensor, start: Tensor, counts: Tensor) -> ForwardBatch:
        assert self._cache is not None, "bind() comes before the first call"
        return uniform_batch(
            token_ids=token_ids,
            start=start,
            counts=counts,
            page_table=committed.page_table,
            page_size=self._cache.page_size,
            max_position=committed.max_position,
            max_visible=committed.max_visible or self._max_visible,
        )
