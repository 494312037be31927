"""Load on an engine in this process: fixed concurrency or due times, every token's arrival noted.

The engine is handed in; it is driven from here, step by step, so nothing but the engine is timed: no HTTP, no
second thread. See `traffic` for what the numbers mean.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from eyas.bench.counters import Counters
from eyas.bench.traffic import Trace, Window, steady_window
from eyas.core.sampling import SamplingParams

Clock = Callable[[], float]


class Engine(Protocol):
    """What is needed of an engine; eyas.engine.llm.LLM is one."""

    @property
    def stats(self) -> Any:
        """Counters with `as_dict`."""
        ...

    def new_intake(self) -> Any:
        """Return something whose `group(token ids, params)` makes requests."""
        ...

    def submit(self, group: Any) -> None:
        """Queue a group."""
        ...

    def step(self) -> bool:
        """Move all on by one step."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of load brought."""

    traces: list[Trace]
    window: Window
    stop: float
    counters: Counters
    """Counted within the window."""
    token_ids: list[list[int]]
    """Output of each request, in the order of the traces."""


@dataclass(slots=True)
class _Live:
    group: Any
    trace: Trace
    seen: int = 0

    @property
    def output_ids(self) -> list[int]:
        ids: list[int] = self.group.requests[0].output_ids
        return ids


class _Driver:
    """Submits, steps and notes; both loops are made of it."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock, self.intake = engine, clock, engine.new_intake()
        self.live: list[_Live] = []
        self.all: list[_Live] = []

    def submit(self, prompt_ids: list[int], params: SamplingParams, start: float) -> None:
        group = self.intake.group(prompt_ids, params)
        # An intake counts from 0 each time; the engine wants ids that are free.
        group.request_id = f"bench-{id(self)}-{len(self.all)}"
        self.engine.submit(group)
        one = _Live(group, Trace(start))
        self.live.append(one)
        self.all.append(one)

    def step(self) -> float:
        """Run one engine step; return the time after it."""
        self.engine.step()
        now = self.clock()
        still = []
        for one in self.live:
            size = len(one.output_ids)
            if size > one.seen:
                one.trace.deliveries.append((now, size - one.seen))
                one.seen = size
            request = one.group.requests[0]
            if request.finish_reason is None:
                still.append(one)
                continue
            one.trace.end, one.trace.num_steps = now, request.stats.steps
            if request.error is not None:
                one.trace.error = str(request.error)
        self.live = still
        return now

    def counters(self) -> Counters:
        return Counters.of_stats(self.engine.stats.as_dict())

    def finish(self) -> None:
        """End what still runs."""
        for one in self.live:
            self.engine.abort(one.group.request_id)
        while self.engine.step():
            pass


def run_closed(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    concurrency: int,
    num_requests: int,
    limit_seconds: float | None = None,
    clock: Clock = time.perf_counter,
) -> Run:
    """Keep `concurrency` requests running until `num_requests` have been sent and have ended, or the limit.

    Request i answers prompt i modulo their number, with params i likewise. The limit counts from the
    opening of the steady window and never cuts ramp-up.
    """
    each = [params] if isinstance(params, SamplingParams) else list(params)
    driver = _Driver(engine, clock)
    begin, before = clock(), driver.counters()
    opened: tuple[float, Counters] | None = None
    closed: tuple[float, Counters] | None = None
    now = begin
    try:
        while True:
            while len(driver.live) < concurrency and len(driver.all) < num_requests:
                number = len(driver.all)
                driver.submit(prompts[number % len(prompts)], each[number % len(each)], clock())
            if not driver.live:
                break
            now = driver.step()
            first = driver.all[:concurrency]
            if opened is None and len(first) == concurrency and all(one.trace.deliveries for one in first):
                opened = (now, driver.counters())
            left = len(driver.live) + num_requests - len(driver.all)
            if opened is not None and closed is None and left < concurrency:
                closed = (now, driver.counters())
            if limit_seconds is not None and opened is not None and now - opened[0] >= limit_seconds:
                break
    finally:
        after = driver.counters()
        driver.finish()
    traces = [one.trace for one in driver.all]
    window = steady_window(traces, concurrency, now)
    if window.steady and opened is not None:
        counted = (after if closed is None else closed[1]) - opened[1]
    else:
        counted = after - before
    return Run(traces, window, now, counted, [list(one.output_ids) for one in driver.all])


def run_open(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    starts: Sequence[float],
    limit_seconds: float | None = None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Send request i when `starts[i]` (seconds from the begin) has come, whatever else runs."""
    driver = _Driver(engine, clock)
    begin, before = clock(), driver.counters()
    now = begin
    try:
        while driver.live or len(driver.all) < len(starts):
            now = clock()
            if limit_seconds is not None and now - begin >= limit_seconds:
                break
            while len(driver.all) < len(starts) and begin + starts[len(driver.all)] <= now:
                number = len(driver.all)
                driver.submit(prompts[number % len(prompts)], params, begin + starts[number])
            if driver.live:
                now = driver.step()
            elif len(driver.all) < len(starts):
                wait = begin + starts[len(driver.all)] - now
                left = wait if limit_seconds is None else min(wait, begin + limit_seconds - now)
                sleep(max(0.0, left))
    finally:
        after = driver.counters()
        driver.finish()
    traces = [one.trace for one in driver.all]
    window = Window(begin, now, steady=False)
    return Run(traces, window, now, after - before, [list(one.output_ids) for one in driver.all])


def warm_up(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    *,
    graphs: bool = True,
) -> None:
    """Let every batch size from `concurrency` down to 1 run for some steps, before anything is timed.

    Kernels are compiled and graphs captured at first use, per batch bucket and per bound on the context. So
    batches thin out (half of the requests end early, half of the rest later, and so on), with the shortest
    prompt and with prompts that end at the longest context, doubling between. Then each batch size takes in
    prompts as they are, as the cells will. Without `graphs` a few tokens at the largest batch are enough.
    """
    few = replace(params, max_tokens=min(4, params.max_tokens), ignore_eos=True)
    if not graphs:
        run_closed(engine, prompts, few, concurrency=concurrency, num_requests=concurrency)
        return
    lengths = warm_up_lengths(concurrency)
    longest = max(prompts, key=len)
    warm_prefill = getattr(engine, "warm_prefill", None)
    if warm_prefill is not None:
        warm_prefill(len(longest) + params.max_tokens)
    for size in warm_up_contexts(min(map(len, prompts)), len(longest) + params.max_tokens - lengths[-1]):
        prompt = (longest * -(-size // len(longest)))[:size]
        thinning = [
            replace(params, max_tokens=min(count, params.max_tokens), ignore_eos=True) for count in lengths
        ]
        run_closed(engine, [prompt], thinning, concurrency=concurrency, num_requests=concurrency)
    places = concurrency
    while places:
        run_closed(engine, prompts, few, concurrency=places, num_requests=places + 1)
        places //= 2


def warm_up_contexts(shortest: int, full: int) -> list[int]:
    """Return prompt lengths through the powers of two: 40, 3000 -> 40, 1024, 2048, 3000.

    Below 1024 all contexts count as one.
    """
    sizes = [shortest]
    while sizes[-1] < full:
        sizes.append(min(full, max(1024, 2 * sizes[-1])))
    return sizes


def warm_up_lengths(concurrency: int, first: int = 8, gap: int = 12) -> list[int]:
    """Return output lengths that thin a batch out by halves: 4 -> 8, 8, 20, 32."""
    lengths: list[int] = []
    left, length = concurrency, first
    while left:
        lengths += [length] * ((left + 1) // 2)
        left -= (left + 1) // 2
        length += gap
    return lengths
