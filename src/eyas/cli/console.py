"""What every verb prints with: results to stdout, notes and progress to stderr."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FILE_WIDTH = 110


def results() -> "Console":
    """Return a rich console on stdout; text is printed as it is, and wide enough for tables in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def notes() -> "Console":
    """Return a rich console on stderr, for what is not a result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def progress(*, disable: bool = False, rate: bool = False) -> Iterator["Progress"]:
    """Yield a progress display on stderr with elapsed time and ETA; slow captures of CUDA graphs show.

    With `rate` tasks have a field of that name, tokens a second.
    """
    from eyas.engine.progress import captures_in, new_bar

    with new_bar(rate=rate, disable=disable) as bar, captures_in(bar):
        yield bar


@contextmanager
def capture_status(show: Callable[[], bool]) -> Iterator[list[float]]:
    """Say on stderr that CUDA graphs are captured, where it is slow and `show()`; yields the seconds each."""
    from eyas.engine.progress import watching_captures

    seconds: list[float] = []

    def begin() -> Callable[[float], None]:
        status = notes().status("capturing CUDA graphs")
        if show():
            status.start()

        def end(taken: float) -> None:
            status.stop()
            seconds.append(taken)

        return end

    with watching_captures(begin):
        yield seconds


def byte_progress() -> "Progress":
    """Return a progress display on stderr for downloads: bytes, speed and ETA; gone when it is done."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=notes(),
        transient=True,
    )


def print_json(value: Any) -> None:
    """Print one JSON document to stdout; dataclasses become objects."""
    print(json.dumps(value, default=_plain, ensure_ascii=False, indent=2))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)


def device_and_dtype(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return `device` and `dtype` for loading a target: CUDA where there is one, unless told otherwise."""
    import torch

    from eyas.core.errors import ConfigError

    wanted = torch_dtype(dtype) if dtype else None
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device: {place!r} is not there: torch {torch.__version__} sees no CUDA device")
    return {"device": place, "dtype": wanted}


def torch_dtype(name: str) -> Any:
    """Return the torch dtype that --dtype names."""
    import torch

    from eyas.core.errors import ConfigError

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in names:
        raise ConfigError(f"--dtype: {name!r} is not one of {', '.join(names)}")
    return names[name]


def whole_numbers(text: str, flag: str) -> list[int]:
    """Return the numbers of "1,8,64"; ConfigError naming the flag for anything else, or for less than 1."""
    from eyas.core.errors import ConfigError

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{flag}: expected whole numbers from 1 with commas between, as in 1,8,64; got {text!r}"
        )
    return numbers
