"""The cells of a sweep: which method, on which prompts, under which load, which repeat; and their order.

A cell has an id made of everything that its numbers depend on. A record that already holds the id need not be
measured again: that is how a sweep goes on where it was stopped, and how cells of another head, machine or
setting are never taken for done.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eyas.bench.datasets import Dataset
from eyas.core.errors import ConfigError

PLAIN = "plain"
AUTO = -1
"""K that the engine takes by batch size, from the head's calibration."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way of decoding: a drafter at one K in this process, or an endpoint that runs one."""

    name: str
    """What records and plots call it, K aside: plain, eagle3, peagle, or a name of the user's."""
    spec: str | None = None
    """Head folder, prompt_lookup or small:PATH; None for plain decoding and for endpoints."""
    num_draft_tokens: int = 0
    """K; 0 for none, AUTO for what calibration found best at each batch size."""
    fingerprint: str | None = None
    """Of the head's files."""
    url: str | None = None
    """An OpenAI-compatible endpoint; None for the engine in this process."""

    @property
    def label(self) -> str:
        """Name and K."""
        return label_of(self.name, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """Fixed concurrency, or requests a second; one of the two is None."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Settings:
    """What all cells of a sweep have in common."""

    target: str
    target_fingerprint: str | None
    machine: str
    """GPU or CPU, in words."""
    dtype: str
    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    num_requests: int = 16
    """Requests of a cell; at fixed concurrency c at least `waves` times c."""
    waves: int = 4
    limit_seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    method: Method
    dataset: str
    load: Load
    repeat: int
    settings: Settings
    phases: bool = False
    """Whether verification and drafting are timed apart, which takes a slower step on CUDA: such a cell says
    where the time goes, not how fast it is."""

    @property
    def num_requests(self) -> int:
        """How many requests are sent, unless time runs out."""
        waves = self.settings.waves * (self.load.concurrency or 0)
        return max(self.settings.num_requests, waves)

    def describe(self) -> dict[str, Any]:
        """Return the cell's coordinates as plain JSON values."""
        return {
            "method": self.method.name,
            "spec": self.method.spec,
            "head_fingerprint": self.method.fingerprint,
            "num_draft_tokens": self.method.num_draft_tokens,
            "engine": self.method.url or "local",
            "dataset": self.dataset,
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "repeat": self.repeat,
            "phases": self.phases,
            **asdict(self.settings),
            "num_requests": self.num_requests,
        }

    @property
    def id(self) -> str:
        """Return 16 hex digits of everything that the numbers depend on; a head's folder is not among it."""
        values = self.describe() | {"spec": None if self.method.fingerprint else self.method.spec}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def plan_cells(
    methods: Sequence[Method],
    datasets: Sequence[Dataset],
    loads: Sequence[Load],
    repeats: int,
    settings: Settings,
    *,
    one_engine_at_a_time: bool = False,
) -> list[Cell]:
    """Return the cells in the order of measuring.

    Methods are innermost and start one further each time, so that whatever drifts (heat, clocks, neighbours)
    touches all alike. With one_engine_at_a_time they are outermost within a repeat, for engines that do not
    fit into memory together.

    Example, methods A B, loads 1 2, one data set, two repeats:
        A1 B1 B2 A2   B1 A1 A2 B2        and one at a time   A1 A2 B1 B2   B1 B2 A1 A2
    """
    labels = [method.label for method in methods]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"a method is named twice: {', '.join(labels)}")
    places = [(dataset.name, load) for dataset in datasets for load in loads]
    cells = []
    for repeat in range(repeats):
        if one_engine_at_a_time:
            cells += [
                Cell(method, dataset, load, repeat, settings)
                for method in rotated(methods, repeat)
                for dataset, load in places
            ]
            continue
        for number, (dataset, load) in enumerate(places):
            cells += [
                Cell(method, dataset, load, repeat, settings) for method in rotated(methods, repeat + number)
            ]
    return cells


def phase_cells(
    methods: Sequence[Method],
    dataset: str,
    loads: Sequence[Load],
    settings: Settings,
    wanted: Callable[[Method, Load], bool] = lambda _method, _load: True,
) -> list[Cell]:
    """Return one cell for every wanted method and load, with phases timed; settings as for all others."""
    return [
        Cell(method, dataset, load, 0, settings, phases=True)
        for method in methods
        for load in loads
        if wanted(method, load)
    ]


def label_of(name: str, num_draft_tokens: int) -> str:
    """Return a method's name with its K: "plain", "eagle3 K=3", "eagle3 K=auto"."""
    if not num_draft_tokens:
        return name
    return f"{name} K={'auto' if num_draft_tokens == AUTO else num_draft_tokens}"


def rotated(methods: Sequence[Method], shift: int) -> list[Method]:
    """Return the methods in an order that starts `shift` further."""
    shift %= len(methods)
    return [*methods[shift:], *methods[:shift]]
