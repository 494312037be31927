"""Progress on stderr: requests done, tokens a second, time left; graphs captured.

Who wants to know of slow captures asks; else the engine says nothing:

    def began():
        print("capturing")
        return lambda seconds: print(f"took {seconds:.1f} s")

    with watching_captures(began):
        llm.generate(prompts)
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SLOW_SECONDS = 2.0
"""A capture that takes longer is told of."""

Watcher = Callable[[], Callable[[float], None]]
"""Called, from a thread of its own, when a capture has taken SLOW_SECONDS and goes on; what it returns is
called with the seconds in all when the capture has ended or failed."""

_watchers: list[Watcher] = []


@contextmanager
def watching_captures(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of all slow captures of CUDA graphs in this process meanwhile."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def capturing() -> Iterator[None]:
    """Around a capture: watchers hear of it if it is slow."""
    if not _watchers:
        yield
        return
    ends: list[Callable[[float], None]] = []
    timer = threading.Timer(SLOW_SECONDS, lambda: ends.extend(watcher() for watcher in [*_watchers]))
    timer.daemon = True
    begin = time.perf_counter()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may just be telling
        for end in ends:
            end(time.perf_counter() - begin)


@contextmanager
def captures_in(bar: "Progress") -> Iterator[None]:
    """Show slow captures as lines of a bar, gone when they are done."""

    def show() -> Callable[[float], None]:
        task = bar.add_task("capturing CUDA graphs", total=None, rate=0.0)
        return lambda _: bar.remove_task(task)

    with watching_captures(show):
        yield


def new_bar(*, rate: bool = False, disable: bool = False) -> "Progress":
    """A bar with elapsed and remaining time; with `rate`, a field of tasks, tokens a second too."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        *([progress.TextColumn("{task.fields[rate]:,.0f} tok/s")] if rate else []),
        progress.TextColumn("elapsed"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
        disable=disable,
    )


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of (finished requests, output tokens), or None where no bar was asked for."""
    if not enabled:
        yield None
        return
    with new_bar(rate=True) as bar, captures_in(bar):
        task = bar.add_task("generating", total=total, rate=0.0)

        def report(done: int, num_tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, rate=num_tokens / elapsed if elapsed else 0.0)

        yield report


@contextmanager
def capture_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (graphs captured, graphs in all)."""
    with new_bar() as bar:
        task = bar.add_task("capturing graphs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
