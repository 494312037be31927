"""Where a step's time goes, and how fast this device multiplies matrices.

Laps are read on the host only when a window is reported: on CUDA they are events, so that timing never makes
the host wait for the device.
"""

import time
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "optimizer")


class Clock:
    """Adds up the time between laps under the name of the lap that ends it.

    start(); work; lap("forward"); work; lap("backward") -> {"forward": s, "backward": s}.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start(self) -> None:
        """Begin a stretch; what lies before it belongs to nobody."""
        self._marks.append((None, self._now()))

    def lap(self, name: str) -> None:
        """End a stretch."""
        self._marks.append((name, self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; waits for the device."""
        totals: dict[str, float] = {}
        if self.cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                passed = before.elapsed_time(after) / 1000 if self.cuda else after - before
                totals[name] = totals.get(name, 0.0) + passed
        self._marks.clear()
        return totals


def gemm_rate(device: torch.device, dtype: torch.dtype, *, repeats: int = 5) -> float:
    """Floating-point operations a second of a large square matrix product here, the best of `repeats`."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    clock, best = Clock(device), 0.0
    for _ in range(repeats):
        clock.start()
        torch.mm(a, b)
        clock.lap("mm")
        best = max(best, 2 * size**3 / max(clock.take()["mm"], 1e-9))
    return best
