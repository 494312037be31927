"""COD, conditional drop-token (PARD, used by P-EAGLE): which rollouts are trained, and how deep.

Depth 0 keeps every row: it is the real context. Let A be the rows whose guess is supervised. Depth 1 draws
a share r of A, depth k a share r^k, and only among rows whose predecessor was kept at depth k - 1. So (row p,
depth k) kept implies (p - 1, k - 1) kept: chains are prefix-closed, and one number says it all: how many
depths an anchor keeps.

Example, one document of rows 0..5, A = {1, 2, 3, 4, 5}, r = 0.8: depth 1 keeps floor(4 * .8) = 3 of A, say
{1, 2, 5}; depth 2 may continue at {2, 3} and keeps floor(3 * .64) = 1, say {3}.
    kept chains: anchor 0 (row 1), anchor 1 (rows 2, 3), anchor 4 (row 5)  ->  lengths [1, 2, 0, 0, 1, 0]
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def shares(num_depths: int, retention: float, min_retention: float) -> list[float]:
    """max(r^k, r_min) for k = 1 .. K - 1."""
    return [max(retention**depth, min_retention) for depth in range(1, num_depths)]


def chain_lengths(
    supervised: Tensor, segments: Tensor, uniforms: Tensor, *, retention: float, min_retention: float = 0.0
) -> Tensor:
    """Kept depths of every anchor, int64 [B, n] in 0 .. K - 1.

    supervised bool [B, n] (rows whose guess is supervised), segments int [B, n], uniforms [K - 1, B, n] in
    [0, 1): the draw of depth k keeps the size_k candidates with the smallest numbers, where
    size_k = floor((|A| - k) * max(r^k, r_min)).
    """
    count = supervised.sum(1, keepdim=True)
    candidates = _first_candidates(supervised, segments)
    lengths = torch.zeros_like(segments, dtype=torch.int64)
    for depth, share in enumerate(shares(len(uniforms) + 1, retention, min_retention), start=1):
        size = ((count - depth).to(torch.float64) * share).floor()
        draw = torch.where(candidates, uniforms[depth - 1], 2.0)
        rank = draw.argsort(dim=1, stable=True).argsort(dim=1)
        kept = candidates & (rank < size)
        lengths = lengths + functional.pad(kept[:, depth:], (0, depth)).long()
        candidates = functional.pad(kept[:, :-1], (1, 0)) & supervised
    return lengths


def full_lengths(supervised: Tensor, segments: Tensor, num_depths: int) -> Tensor:
    """Chain lengths where nothing is dropped: as deep as supervised rows follow (for validation)."""
    kept = _first_candidates(supervised, segments)
    lengths = torch.zeros_like(segments, dtype=torch.int64)
    for depth in range(1, num_depths):
        lengths = lengths + functional.pad(kept[:, depth:], (0, depth)).long()
        kept = functional.pad(kept[:, :-1], (1, 0)) & supervised
    return lengths


def cap_anchors(lengths: Tensor, uniforms: Tensor, max_anchors: int) -> Tensor:
    """Chain lengths [B, n] of the max_anchors rollouts of each row with the smallest of uniforms [B, n].

    Lengths 2 0 1 3, uniforms .5 .1 .9 .2, max_anchors 2 -> 2 0 0 3. Other cuts would break rollouts.
    """
    rank = torch.where(lengths > 0, uniforms, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    return torch.where(rank < max_anchors, lengths, 0)


def _first_candidates(supervised: Tensor, segments: Tensor) -> Tensor:
    """Rows that depth 1 may keep: their anchor, the row before, must stand in the same document."""
    previous = functional.pad(segments[:, :-1], (1, 0), value=-1)
    return supervised & (previous == segments) & (segments >= 0)


def capacities(
    max_supervised: int, row_length: int, num_depths: int, *, retention: float, min_retention: float = 0.0
) -> tuple[int, ...]:
    """Bound of kept slots per row at depths 1 .. K - 1, when no row has more than max_supervised in A."""
    return tuple(
        min(row_length, max(math.floor((max_supervised - depth) * share), 0))
        for depth, share in enumerate(shares(num_depths, retention, min_retention), start=1)
    )
