"""Clocks for work on a device: CUDA graphs between events, or calls between looks at the wall clock.

On CUDA everything is captured first, so that the host is not what is timed, and a pause on the device lets
the host queue a whole round ahead. Every round starts from the same state (`restore`).
"""

import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

Call = Callable[[], Any]

_PAUSE_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock: longer than the host needs to launch the largest graphs."""


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of `call`, which must have run before (kernels are compiled)."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        # Plain decoding drafts nothing.
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
        with torch.cuda.graph(graph):
            call()
    return graph


class Stopwatch:
    """Times a sequence of calls, each for itself, round after round."""

    def __init__(self, calls: Sequence[Call], device: torch.device, *, restore: Call = lambda: None) -> None:
        self._cuda, self._restore = device.type == "cuda", restore
        self._calls: list[Call] = list(calls)
        if self._cuda:
            # Captured in order: a later graph reads what an earlier one left in its static tensors.
            self.graphs = [capture(call) for call in calls]
            self._calls = [graph.replay for graph in self.graphs]

    def round(self) -> list[float]:
        """Milliseconds of each call, run once in order."""
        self._restore()
        return self._events() if self._cuda else self._wall()

    def in_a_row(self, count: int) -> float:
        """Milliseconds of one of many rounds without pauses, the median of the second half.

        A device that draws all the power it may runs at lower clocks by then.
        """
        if not self._cuda:
            times = []
            for _ in range(count):
                self._restore()
                times.append(sum(self._wall()))
            return median(times[count // 2 :])
        marks = []
        for _ in range(count):
            self._restore()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for call in self._calls:
                call()
            end.record()
            marks.append((begin, end))
        marks[-1][1].synchronize()
        return float(median(begin.elapsed_time(end) for begin, end in marks[count // 2 :]))

    def _events(self) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(self._calls) + 1)]  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_PAUSE_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - has no public name
        marks[0].record()
        for call, mark in zip(self._calls, marks[1:], strict=True):
            call()
            mark.record()
        marks[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(marks)]

    def _wall(self) -> list[float]:
        marks = [time.perf_counter()]
        for call in self._calls:
            call()
            marks.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in pairwise(marks)]
