"""What was delivered when, and the speeds and latencies that follow. Pure functions over one clock's seconds.

Closed loop (fixed concurrency c): N requests through c places, each refilled as it falls free. Speed is taken
over the *steady window*: from the moment when all c places have delivered something to the moment when one
cannot be refilled any more. Ramp-up and the thinning tail, in which fewer than c requests run, stay out.

Open loop (Poisson): requests are due at times drawn beforehand, whether or not earlier ones have ended. Time
to first token counts from when a request was due.

    ttft   first delivery - start                        e2e    last delivery - start
    tpot   (last - first delivery) / (tokens - 1)        itl    gap between two deliveries of one request

A delivery may hold several tokens: that is what speculation does. `itl` is what a reader of a stream sees
(and what `vllm bench serve` calls so), `tpot` is the mean per token.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Trace:
    """One request."""

    start: float
    """When it was sent; in an open loop, when it was due."""
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of each piece."""
    end: float | None = None
    """When it was complete or failed; None if it was cut off."""
    error: str | None = None
    num_steps: int = 0
    """Forwards of the target that it took part in, where the engine says so."""

    @property
    def completed(self) -> bool:
        """Whether it was answered in full."""
        return self.end is not None and self.error is None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return sum(count for _, count in self.deliveries)


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a run, open at the begin: a delivery at `begin` is not in it, one at `end` is."""

    begin: float
    end: float
    steady: bool

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin

    def tokens(self, traces: Sequence[Trace]) -> int:
        """Tokens delivered in it."""
        return sum(n for trace in traces for at, n in trace.deliveries if self.begin < at <= self.end)


def steady_window(traces: Sequence[Trace], concurrency: int, stop: float) -> Window:
    """Return the steady window of a closed loop that ended, or was cut off, at `stop`.

    `traces` in the order of sending. With N requests in c places, the first N - c ends are refilled; the next
    one closes the window. The whole run, from the first start, where there is no such window.

    Example, c = 2, requests (first delivery, end): (1, 4) (2, 5) (5, 9) -> open 2, ends 4, 5, 9, one refill:
    the second end, 5, closes it.
    """
    whole = Window(min((trace.start for trace in traces), default=stop), stop, steady=False)
    first = traces[:concurrency]
    if len(first) < concurrency or not all(trace.deliveries for trace in first):
        return whole
    begin = max(trace.deliveries[0][0] for trace in first)
    ends = sorted(trace.end for trace in traces if trace.end is not None)
    refilled = len(traces) - concurrency
    end = min(stop, ends[refilled]) if refilled < len(ends) else stop
    return Window(begin, end, steady=True) if end > begin else whole


def poisson_starts(rate: float, num_requests: int, seed: int = 0) -> list[float]:
    """Return the times, from 0, at which an open loop's requests are due; `rate` in requests a second."""
    draw, at, starts = random.Random(seed), 0.0, []  # noqa: S311 -- a workload, not secrets
    for _ in range(num_requests):
        at += draw.expovariate(rate)
        starts.append(at)
    return starts


def latencies(traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
    """Return ttft, tpot, itl and e2e of completed requests in milliseconds: means and percentiles."""
    done = [trace for trace in traces if trace.completed and trace.deliveries]
    first = [trace.deliveries[0][0] for trace in done]
    last = [trace.deliveries[-1][0] for trace in done]
    values = {
        "ttft_ms": [at - trace.start for trace, at in zip(done, first, strict=True)],
        "tpot_ms": [
            (end - begin) / (trace.num_tokens - 1)
            for trace, begin, end in zip(done, first, last, strict=True)
            if trace.num_tokens > 1
        ],
        "itl_ms": [
            after[0] - before[0]
            for trace in done
            for before, after in zip(trace.deliveries, trace.deliveries[1:], strict=False)
        ],
        "e2e_ms": [at - trace.start for trace, at in zip(done, last, strict=True)],
    }
    return {name: spread([1e3 * value for value in part]) for name, part in values.items() if part}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles."""
    ordered = sorted(values)
    return {"mean": fmean(ordered)} | {f"p{q}": percentile(ordered, q) for q in PERCENTILES}


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the q-th percentile of ascending values, linear between neighbours: 50 of (1, 2, 4) -> 2."""
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(traces: Sequence[Trace], window: Window, stop: float) -> dict[str, Any]:
    """Return speeds, counts and latencies of a run, as plain JSON values."""
    seconds = stop - min((trace.start for trace in traces), default=stop)
    tokens, total = window.tokens(traces), sum(trace.num_tokens for trace in traces)
    return {
        "output_tokens_per_second": tokens / window.seconds if window.seconds > 0 else 0.0,
        "window": "steady" if window.steady else "whole",
        "window_seconds": window.seconds,
        "window_tokens": tokens,
        "seconds": seconds,
        "whole_tokens_per_second": total / seconds if seconds > 0 else 0.0,
        "num_requests": len(traces),
        "num_completed": sum(trace.completed for trace in traces),
        "num_errors": sum(trace.error is not None for trace in traces),
        "num_tokens": total,
        **latencies(traces),
    }
