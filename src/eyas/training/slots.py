"""Slots: the (anchor, depth) pairs that a forward of the drafter predicts, as flat tensors [B, M]."""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.reference.slot_attention import Stairs
from eyas.training.rows import DraftRows


class Slots(NamedTuple):
    """Slot (anchor a, depth k) guesses what row a + k guesses. Padding has segment -1."""

    anchors: Tensor
    """int64 [B, M], row index of the anchor"""
    depths: Tensor
    """int64 [M] or [B, M]"""
    segments: Tensor
    """int32 [B, M]"""
    supervised: Tensor
    """bool [B, M]"""
    blocks: tuple[int, ...] = ()
    """Sizes of the blocks of depth 1, 2, ... in P-EAGLE's layout by depth."""
    stairs: Stairs | None = None
    """What each slot sees, in the layout by anchor (nn/staircase.py); None where masks say it."""


def make_slots(
    rows: DraftRows,
    anchors: Tensor,
    depths: Tensor,
    valid: Tensor | None = None,
    blocks: tuple[int, ...] = (),
) -> Slots:
    """Slots of anchors [B, M] at depths [M] or [B, M].

    Supervised iff valid, in one document, and row a + k is.

    >>> # rows of segment 0 0 0 -1, all guesses supervised but the last two: slot (0, 1) is supervised
    >>> # because row 1 is; slot (1, 1) is not, because row 2's guess is not; slot (2, 1) leaves the document.
    """
    n = rows.tokens.shape[1]
    index = anchors + depths
    inside = index < n
    place = index.clamp(max=n - 1)
    segments = rows.segments.gather(1, anchors)
    if valid is not None:
        segments = torch.where(valid, segments, -1)
    same = (segments == rows.segments.gather(1, place)) & (segments >= 0) & inside
    return Slots(anchors, depths, segments, same & rows.supervised.gather(1, place), blocks)


def previous_tokens(slots: Slots, rows: DraftRows) -> Tensor:
    """The data's token that the slot before guesses, int64 [B, M]; -1 at depth 0, which has none.

    Slot (a, k) follows the token of row a + k: tokens x1 x2 x3, slot (0, 1) -> x2, slot (0, 2) -> x3.
    """
    return torch.where(slots.depths > 0, rows.tokens.gather(1, guess_index(slots, rows.tokens.shape[1])), -1)


def guess_index(slots: Slots, row_length: int) -> Tensor:
    """Row whose guess each slot makes, int64 [B, M]; clamped where a slot runs out of the row."""
    return (slots.anchors + slots.depths).clamp(max=row_length - 1)
