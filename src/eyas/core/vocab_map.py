"""The map between a drafter's reduced vocabulary (Vd ids) and the target's (V ids).

Stored as the serving engines read it: `d2t` holds OFFSETS, target id = draft id + d2t[draft id]; `t2d`
is True for target ids that the drafter can name. Draft ids are sorted by target id.

    target vocabulary of 6, draft vocabulary {1, 2, 5}:
        d2t = [1, 1, 3]          (0+1=1, 1+1=2, 2+3=5)
        t2d = [F, T, T, F, F, T]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.core.errors import ModelFormatError


@dataclass(frozen=True)
class VocabMap:
    """`target_ids` int64 [Vd], ascending and distinct; `vocab_size` is the target's V."""

    target_ids: Tensor
    vocab_size: int

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int, t2d: Tensor | None = None) -> "VocabMap":
        """Read the offset form and check it: in range, ascending, and agreeing with t2d if given."""
        target_ids = d2t.to(torch.int64) + torch.arange(d2t.numel(), device=d2t.device)
        if d2t.ndim != 1 or d2t.numel() == 0:
            raise ModelFormatError(f"d2t must be a vector of offsets, got shape {tuple(d2t.shape)}")
        if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size:
            raise ModelFormatError(
                f"d2t points outside the target vocabulary of {vocab_size}: ids run from "
                f"{int(target_ids.min())} to {int(target_ids.max())}. d2t must hold offsets "
                "(target id minus draft id), not target ids."
            )
        if bool((target_ids[1:] <= target_ids[:-1]).any()):
            raise ModelFormatError("d2t must map draft ids to ascending, distinct target ids")
        vocab_map = cls(target_ids, vocab_size)
        if t2d is not None and not torch.equal(t2d.bool().cpu(), vocab_map.t2d.cpu()):
            raise ModelFormatError("d2t and t2d disagree about which target ids the drafter knows")
        return vocab_map

    @classmethod
    def identity(cls, vocab_size: int) -> "VocabMap":
        """The full vocabulary: draft ids are target ids."""
        return cls(torch.arange(vocab_size), vocab_size)

    @property
    def draft_vocab_size(self) -> int:
        """Vd."""
        return self.target_ids.numel()

    @property
    def is_identity(self) -> bool:
        """Whether draft ids are target ids."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def d2t(self) -> Tensor:
        """Offsets, int64 [Vd]."""
        return self.target_ids - torch.arange(self.draft_vocab_size, device=self.target_ids.device)

    @property
    def t2d(self) -> Tensor:
        """Which target ids the drafter can name, bool [V]."""
        known = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.target_ids.device)
        known[self.target_ids] = True
        return known

    def to(self, device: torch.device | str) -> "VocabMap":
        """The same map on another device."""
        return VocabMap(self.target_ids.to(device), self.vocab_size)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return self.target_ids[draft_ids]

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Draft ids of target ids, any shape; -1 where the drafter has no such token."""
        table = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=token_ids.device)
        table[self.target_ids] = torch.arange(self.draft_vocab_size, device=token_ids.device)
        return table[token_ids]

    def restrict(self, logits: Tensor) -> Tensor:
        """Columns of target logits [..., V] that the drafter knows: [..., Vd]."""
        return logits if self.is_identity else logits[..., self.target_ids]

    def scatter(self, probs: Tensor) -> Tensor:
        """Draft probabilities [..., Vd] over the target vocabulary [..., V], zero elsewhere.

        p is never renormalised to the draft vocabulary: tokens outside it simply have q = 0.
        """
        if self.is_identity:
            return probs
        full = probs.new_zeros((*probs.shape[:-1], self.vocab_size))
        return full.index_copy_(-1, self.target_ids, probs)
