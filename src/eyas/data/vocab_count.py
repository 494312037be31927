"""Choices that depend on which tokens the data has: the draft vocabulary and P-EAGLE's mask token."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.core.errors import ConfigError, DataError
from eyas.core.vocab_map import VocabMap
from eyas.data.store import TokenStore


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each target id stands in the data: int64 [V] each."""

    all: NDArray[np.int64]
    supervised: NDArray[np.int64]


def count_tokens(store: TokenStore) -> TokenCounts:
    """Count all tokens of a store, and those that the assistant wrote."""
    size = int(store.manifest["vocab_size"])
    ids = store.ids.astype(np.int64)
    return TokenCounts(np.bincount(ids, minlength=size), np.bincount(ids[store.mask], minlength=size))


def draft_vocabulary(counts: TokenCounts, draft_vocab_size: int) -> tuple[VocabMap, float]:
    """The most frequent supervised ids, and the share of supervised tokens that they cover.

    Ties go to ids more frequent in all of the data, then to lower ids. Counts [0, 5, 1, 5], size 2 ->
    target ids [1, 3], coverage 10 / 11. Size V gives the identity.
    """
    vocab_size = counts.supervised.size
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ConfigError(f"draft_vocab_size={draft_vocab_size}: must be between 1 and {vocab_size}")
    order = np.lexsort((np.arange(vocab_size), -counts.all, -counts.supervised))
    chosen = np.sort(order[:draft_vocab_size])
    total = max(int(counts.supervised.sum()), 1)
    vocab_map = VocabMap(torch.from_numpy(chosen.astype(np.int64)), vocab_size)
    return vocab_map, float(counts.supervised[chosen].sum()) / total


def choose_mask_token(
    counts: TokenCounts, tokenizer: Any, *, template_ids: frozenset[int], wanted: int | None
) -> int:
    """An id that provably stands nowhere: not in data or chat template, not end or start of text.

    Preferred are rows of the embedding table that the tokenizer cannot produce, then added tokens that
    neither data nor template use. `wanted` is checked instead of chosen. Raises DataError.
    """
    vocab_size = counts.all.size
    special = {
        getattr(tokenizer, name, None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id")
    }
    forbidden = template_ids | {token for token in special if isinstance(token, int)}
    if wanted is not None:
        if not 0 <= wanted < vocab_size:
            raise DataError(f"mask_token_id={wanted} is outside the vocabulary of {vocab_size}")
        if counts.all[wanted] or wanted in forbidden:
            raise DataError(
                f"mask_token_id={wanted} is in use ({counts.all[wanted]} times in the data, or special, or "
                "in the chat template); leave it out to have an unused id chosen"
            )
        return wanted
    beyond = range(len(tokenizer), vocab_size) if tokenizer is not None else range(0)
    added = sorted(tokenizer.get_added_vocab().values()) if tokenizer is not None else []
    plain = range(vocab_size - 1, -1, -1) if tokenizer is None else range(0)
    for token in (*beyond, *added, *plain):
        if token < vocab_size and token not in forbidden and not counts.all[token]:
            return int(token)
    raise DataError("no unused token id was found for the mask; give mask_token_id")
