"""Does a sample come from this distribution? Pearson's chi-square test, with nothing but torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

MIN_EXPECTED = 5.0
"""Cells that expect fewer observations are pooled: below this the statistic is no longer chi-square."""


class ChiSquare(NamedTuple):
    """Outcome of a test."""

    statistic: float
    degrees: int
    """Cells after pooling, minus one; 0 if too few observations leave a single cell (p_value is then 1)."""
    p_value: float
    """Chance of a statistic at least this large if the sample does come from the distribution."""


def chi_square(observed: Sequence[int], probs: Sequence[float]) -> ChiSquare:
    """Test counts against probabilities (which are normalised first).

    Cells with few expected observations are pooled, the rarest first, until the pool expects enough. A
    single observation in a cell of probability 0 makes the p-value 0.

    Example: observed [48, 52], probs [0.5, 0.5] -> statistic 0.16, degrees 1, p-value 0.69.
    """
    assert len(observed) == len(probs), "one count for each probability"
    total, mass = sum(observed), sum(probs)
    cells = sorted((total * p / mass, count) for count, p in zip(observed, probs, strict=True))
    if any(count for expected, count in cells if expected == 0.0):
        return ChiSquare(float("inf"), len(cells) - 1, 0.0)
    pooled: list[tuple[float, int]] = [(0.0, 0)]
    for expected, count in cells:
        if pooled[-1][0] >= MIN_EXPECTED:
            pooled.append((0.0, 0))
        pooled[-1] = (pooled[-1][0] + expected, pooled[-1][1] + count)
    degrees = len(pooled) - 1
    if degrees == 0:
        return ChiSquare(0.0, 0, 1.0)
    statistic = sum((count - expected) ** 2 / expected for expected, count in pooled)
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return ChiSquare(statistic, degrees, float(torch.special.gammaincc(half[0], half[1])))
