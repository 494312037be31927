"""Draft rows of packed documents: token j + 1 beside feature j (core.capture's shift), and who is supervised.

Row j stands at RoPE position j of its document and guesses token j + 2; the teacher's word on that token is
the target's distribution AT position j + 1. Slot (anchor a, depth k) guesses what row a + k guesses.

    tokens            x0 x1 x2 y0 y1        (documents x and y)
    row               0  1  2  3  4
    its token         x1 x2 y0 y1 -
    segments          x  x  -1 y  -1        row 2 would pair x2 with y0, row 4 has no next token
    guess             x2 y0 -- -- --        only row 0's guess stays in its document
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eyas.core.capture import shift_by_one
from eyas.data.loader import Batch


class DraftRows(NamedTuple):
    """n rows for n tokens (the last row is padding, so that shapes stay round)."""

    tokens: Tensor
    """int64 [B, n], the token after each position"""
    positions: Tensor
    """int64 [B, n], RoPE position of the row at depth 0"""
    segments: Tensor
    """int32 [B, n], -1 where the row's token is not in the row's document"""
    supervised: Tensor
    """bool [B, n], whether the token that the row guesses is the assistant's, of the same document"""
    answers: Tensor
    """int64 [B, n], the token that the row guesses, as the data has it"""


def draft_rows(batch: Batch) -> DraftRows:
    """Shift a batch by one; features are shifted with `shift_features`."""
    ids = batch.ids.long()
    tokens, _ = shift_by_one(ids, ids.unsqueeze(-1))
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    segments = torch.where(same & (batch.segments[:, :-1] >= 0), batch.segments[:, :-1], -1)
    two_ahead = batch.supervised[:, 2:] & (batch.segments[:, 2:] == batch.segments[:, :-2])
    return DraftRows(
        tokens=functional.pad(tokens, (0, 1)),
        positions=batch.positions.long(),
        segments=functional.pad(segments, (0, 1), value=-1),
        supervised=functional.pad(two_ahead & (segments[:, :-1] >= 0), (0, 2)),
        answers=functional.pad(ids[:, 2:], (0, 2)),
    )


def shift_features(batch: Batch, features: Tensor) -> Tensor:
    """Features of draft rows [B, n, A * D]; the last row is zero padding."""
    _, kept = shift_by_one(batch.ids, features)
    return functional.pad(kept, (0, 0, 0, 1))


def teacher_rows(values: Tensor) -> Tensor:
    """Move what the target says at position j + 1 to row j: [B, n, ...] -> [B, n, ...], last row zero."""
    return torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)
