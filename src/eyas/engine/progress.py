"""Progress bars on stderr: requests done, tokens a second, time left; or graphs captured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of (finished requests, output tokens), or None where no bar was asked for."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generate", total=total, rate=0.0)

        def report(done: int, num_tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, rate=num_tokens / elapsed if elapsed else 0.0)

        yield report


@contextmanager
def capture_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (graphs captured, graphs in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("capturing graphs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("capture", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
