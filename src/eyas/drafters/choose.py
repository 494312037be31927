"""From a drafter's logits to a guess: argmax (a point mass) or a draw whose distribution q is kept.

Random numbers come from a callable that is handed in and are keyed by (seed, absolute position of the
guessed token), stream 3, so a request's drafts do not depend on its batch neighbours.
"""

from typing import Protocol

import torch
from torch import Tensor

from eyas.core.batch import Committed
from eyas.core.vocab_map import VocabMap
from eyas.kernels.reference.random import draw

DRAFT_STREAM = 3


class Uniform(Protocol):
    """Counter-based random numbers: int64 seeds and positions of one shape -> float64 in (0, 1)."""

    def __call__(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """Numbers of the seeds' shape."""
        ...


def choose_greedily(logits: Tensor, vocab_map: VocabMap) -> Tensor:
    """Target ids [...] of the largest of logits [..., Vd]."""
    return vocab_map.to_target(logits.argmax(-1))


def choose_by_sampling(
    logits: Tensor, vocab_map: VocabMap, committed: Committed, first_depth: int, uniform: Uniform
) -> tuple[Tensor, Tensor]:
    """Draw the guesses at depths first_depth, first_depth + 1, ... from softmax(logits / temperature).

    logits [B, k, Vd] -> (target ids int64 [B, k], q float32 [B, k, V]). Rows of temperature 0 take the
    argmax and a one-hot q. Depth 0 guesses the token at position start + counts + 1 (`Committed`).
    """
    temperature = committed.temperature.to(torch.float32)[:, None, None]
    wide = logits.float()
    one_hot = torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
    drawn = torch.softmax(wide / temperature.clamp_min(1e-6), dim=-1)
    probs = torch.where(temperature > 0, drawn, one_hot)
    depth = torch.arange(logits.shape[1], device=logits.device) + first_depth
    positions = (committed.start + committed.counts + 1)[:, None] + depth
    numbers = uniform(committed.seeds[:, None].expand_as(positions), positions, DRAFT_STREAM)
    return vocab_map.to_target(draw(probs, numbers)), vocab_map.scatter(probs)
