"""Which kernels a step launches, and how long the device is busy inside it: one replay under the profiler.

The profiler slows launches a little, so gaps look longer than they are; numbers of launches are exact.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eyas.bench.step_clock import Call

NUM_KERNELS = 16
"""Kernels that are listed, those that take longest first."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel in a step."""

    name: str
    count: int
    ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What one replay showed."""

    launches: int
    """Kernels, copies and fills."""
    busy_ms: float
    span_ms: float
    """From the first start to the last end."""
    kernels: list[Kernel]


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def profile(call: Call = lambda: None) -> Profile:
    """Run `call` once under the profiler; CUDA only.

    The first session of a process must come before graphs are captured, else their kernels are not seen.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in recorded.events()
        if event.device_type.name == "CUDA"
    ]
    return summarize(spans)


def summarize(spans: list[tuple[str, float, float]]) -> Profile:
    """A profile of (name, start, end) in microseconds."""
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for name, start, end in spans:
        counts[name] += 1
        times[name] += (end - start) / 1e3
    names = sorted(times, key=lambda name: -times[name])[:NUM_KERNELS]
    return Profile(
        launches=len(spans),
        busy_ms=busy((start, end) for _, start, end in spans) / 1e3,
        span_ms=(max(end for _, _, end in spans) - min(start for _, start, _ in spans)) / 1e3
        if spans
        else 0.0,
        kernels=[Kernel(name, counts[name], times[name]) for name in names],
    )
