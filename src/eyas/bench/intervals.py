"""Confidence intervals of 95 %: Student's t over repeats, the bootstrap over requests."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import TypeVar

T = TypeVar("T")

# Two-sided 95 % points of Student's t for 1 ... 30 degrees of freedom; 1.96 is the limit.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its interval; both ends are None where one measurement says nothing about spread."""

    value: float
    low: float | None
    high: float | None
    num: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def t_interval(values: Sequence[float]) -> Estimate:
    """Return mean and t interval of independent measurements; ValueError for none.

    Example: 10, 12, 14 -> mean 12, deviation 2, half width 4.303 * 2 / sqrt(3) = 4.97
    """
    if not values:
        raise ValueError("no values")
    mean, num = fmean(values), len(values)
    if num == 1:
        return Estimate(mean, None, None, 1)
    factor = _T95[num - 2] if num - 1 <= len(_T95) else 1.96
    half = factor * stdev(values) / sqrt(num)
    return Estimate(mean, mean - half, mean + half, num)


def geometric_interval(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of positive measurements and its t interval, taken on logarithms.

    Example: 2 and 8 -> mean 4; the interval has no end below 0.
    """
    logs = t_interval([log(value) for value in values])
    low, high = (None if end is None else exp(min(end, 700.0)) for end in (logs.low, logs.high))
    return Estimate(exp(logs.value), low, high, logs.num)


def ratio_interval(left: Sequence[float], right: Sequence[float]) -> Estimate:
    """Return the geometric mean of paired ratios and its interval.

    Pairs were measured right after one another, so what slowed both cancels. Example: (2, 8) over (1, 2)
    -> ratios 2 and 4, mean sqrt(8) = 2.83.
    """
    return geometric_interval([a / b for a, b in zip(left, right, strict=True)])


def bootstrap_interval(
    rows: Sequence[T], statistic: Callable[[Sequence[T]], float], *, num_samples: int = 1000, seed: int = 0
) -> Estimate:
    """Return a statistic of rows and the percentile bootstrap interval; the same for the same seed."""
    value, num = statistic(rows), len(rows)
    if num < 2:
        return Estimate(value, None, None, num)
    draw = random.Random(seed)  # noqa: S311 -- resampling, not secrets
    drawn = sorted(statistic(draw.choices(rows, k=num)) for _ in range(num_samples))
    return Estimate(value, drawn[int(0.025 * num_samples)], drawn[int(0.975 * num_samples)], num)
