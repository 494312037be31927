"""Confidence intervals of 95 %: Student's t over repeats, the bootstrap over requests.

Two repeats tell nothing about their own spread: with one degree of freedom t is 12.7. Cells that are measured
in the same way have about the same spread on logarithms, so few repeats borrow it from all such cells
(`pooled_spread`): 14 cells of two repeats have 14 degrees of freedom, and t is 2.1.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev, variance
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
    half = t95(num - 1) * stdev(values) / sqrt(num)
    return Estimate(mean, mean - half, mean + half, num)


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of a measurement's logarithm, and the degrees of freedom that it was found with."""

    deviation: float
    degrees: int


def pooled_spread(groups: Iterable[Sequence[float]]) -> Spread | None:
    """Return what repeats of positive measurements differ by, over groups of them; None without repeats.

    Example: (1, e) and (2, 2) -> deviations of ln 0.71 and 0, one degree each: sqrt(0.25) = 0.5, two degrees.
    """
    total, degrees = 0.0, 0
    for group in groups:
        if len(group) > 1:
            total += (len(group) - 1) * variance(log(value) for value in group)
            degrees += len(group) - 1
    return Spread(sqrt(total / degrees), degrees) if degrees else None


def paired_spread(tables: Iterable[Sequence[Sequence[float]]]) -> Spread | None:
    """Return what is left of it where whole repeats may be slower or faster, which ratios do not see.

    A table has a line for each thing that was measured and a column for each repeat: what remains of a
    logarithm without its line's mean and its column's.

    Example: (1, 2) and (3, 6) -> 0 with one degree of freedom.
    """
    total, degrees = 0.0, 0
    for table in tables:
        logs = [[log(value) for value in line] for line in table]
        if len(logs) < 2 or len(logs[0]) < 2:
            continue
        columns = [fmean(column) for column in zip(*logs, strict=True)]
        mean = fmean(columns)
        for line in logs:
            own = fmean(line)
            total += sum((x - own - at + mean) ** 2 for x, at in zip(line, columns, strict=True))
        degrees += (len(logs) - 1) * (len(columns) - 1)
    return Spread(sqrt(total / degrees), degrees) if degrees else None


def t95(degrees: int) -> float:
    """Return the two-sided 95 % point of Student's t."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96


def geometric_interval(values: Sequence[float], spread: Spread | None = None) -> Estimate:
    """Return the geometric mean of positive measurements and its t interval, taken on logarithms.

    With a `spread` of more degrees of freedom than the values have of their own, that one counts.
    Example: 2 and 8 -> mean 4; the interval has no end below 0.
    """
    logs = t_interval([log(value) for value in values])
    if spread is not None and spread.degrees > len(values) - 1:
        half = t95(spread.degrees) * spread.deviation / sqrt(len(values))
        logs = Estimate(logs.value, logs.value - half, logs.value + half, logs.num)
    low, high = (None if end is None else exp(min(end, 700.0)) for end in (logs.low, logs.high))
    return Estimate(exp(logs.value), low, high, logs.num)


def ratio_interval(left: Sequence[float], right: Sequence[float], spread: Spread | None = None) -> Estimate:
    """Return the geometric mean of paired ratios and its interval.

    Pairs were measured right after one another, so what slowed both cancels. Example: (2, 8) over (1, 2)
    -> ratios 2 and 4, mean sqrt(8) = 2.83. `spread` is that of one measurement (`paired_spread`), and
    a ratio has two.
    """
    of_ratio = None if spread is None else Spread(sqrt(2) * spread.deviation, spread.degrees)
    return geometric_interval([a / b for a, b in zip(left, right, strict=True)], of_ratio)


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
