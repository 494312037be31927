"""What the engine counted, and a clock for the phases of a step that never waits for the device.

Acceptance length (AL) = 1 + accepted / drafted_row_steps: tokens per verification of drafts, the target's own
included, as vLLM counts it. A forward without drafts (a request's first, or where the drafter has no guess)
says nothing about the head and does not count; tokens_per_forward = committed / row_steps counts every
forward, and is what throughput follows from. Tokens dropped behind a stop count nowhere.

Example, K = 3, one request, three steps that keep 1, 4 and 2 tokens, the first without drafts:
    committed 7   row_steps 3   tokens_per_forward 2.33
    accepted 4    drafted_row_steps 2   AL 3   accepted_by_depth [2, 1, 1]
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas.core.outputs import acceptance_length


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made or `reset` was called; seconds are wall time of the device's work."""

    steps: int = 0
    """Decode steps (target forwards), whatever the batch."""
    row_steps: int = 0
    """Requests summed over decode steps."""
    committed: int = 0
    """Output tokens kept."""
    drafted: int = 0
    """Drafts that were verified."""
    drafted_row_steps: int = 0
    """Row steps that verified at least one draft; a request's first step has none."""
    accepted: int = 0
    """Drafts that became output."""
    runs: list[int] = field(default_factory=list)
    """runs[n]: how often n - 1 drafts of a step became output, n = 1 .. K + 1."""
    prefill_tokens: int = 0
    prefix_tokens: int = 0
    """Tokens of requests that K and V were needed of when they were admitted first."""
    prefix_hits: int = 0
    """How many of those were found in the prefix cache."""
    preemptions: int = 0
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    """Decode steps that were timed as a whole: one CUDA graph holds both phases."""
    verify_seconds: float = 0.0
    """Target forward and acceptance, where steps are timed by phase."""
    draft_seconds: float = 0.0
    """Drafter's rows, its forwards, and the commit."""
    wall_seconds: float = 0.0
    """Time spent in Runner.step."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification of drafts, the target's own included; 1 without drafts, 0 at first."""
        return acceptance_length(self.row_steps, self.drafted_row_steps, self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        """Mean tokens kept per target forward and request, forwards without drafts too; 0 without steps."""
        return self.committed / self.row_steps if self.row_steps else 0.0

    @property
    def accepted_by_depth(self) -> list[int]:
        """How many row steps accepted the draft at depth 1, 2, ..., unconditional."""
        return [sum(self.runs[depth + 1 :]) for depth in range(1, len(self.runs) - 1)]

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of row steps with drafts that accepted the one at depth 1, 2, ..., unconditional."""
        return [count / max(self.drafted_row_steps, 1) for count in self.accepted_by_depth]

    @property
    def prefix_hit_rate(self) -> float:
        """Share of tokens found in the prefix cache; 0 without one."""
        return self.prefix_hits / self.prefix_tokens if self.prefix_tokens else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Wall time in which the device did nothing of this: the host's own work, where it hides nowhere."""
        device = self.prefill_seconds + self.step_seconds + self.verify_seconds + self.draft_seconds
        return max(0.0, self.wall_seconds - device)

    def reset(self) -> None:
        """Start again from zero."""
        fresh = EngineStats(runs=[0] * len(self.runs))
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))

    def as_dict(self) -> dict[str, Any]:
        """Everything above as plain JSON values."""
        names = [name for name in self.__dataclass_fields__ if name != "runs"]
        derived = [
            "prefix_hit_rate",
            "acceptance_length",
            "tokens_per_forward",
            "accepted_by_depth",
            "acceptance_by_depth",
            "overhead_seconds",
        ]
        return {name: getattr(self, name) for name in names + derived}


@dataclass(frozen=True, slots=True)
class Lap:
    """When a phase ran, by the device's clock on CUDA and the wall clock elsewhere."""

    name: str
    begin: float
    end: float
    """Milliseconds since the first lap began."""
    late: bool
    """CUDA: the lap before had ended when this one's work was launched, so the device waited for the host."""


class PhaseClock:
    """Adds the time since the last mark to a field of EngineStats.

    On CUDA the marks are events, read once the device has passed them; elsewhere the wall clock.
    """

    def __init__(self, stats: EngineStats, device: torch.device) -> None:
        self._stats, self._cuda = stats, device.type == "cuda"
        self._last = 0.0
        self._event: torch.cuda.Event | None = None
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, str]] = []
        self._kept: list[tuple[Any, Any, str, bool]] | None = None

    def keep(self) -> None:
        """From here on remember every lap, for `laps`: a benchmark's."""
        self._kept = []

    def laps(self) -> list[Lap]:
        """What was remembered, which ends with this; waits for the device."""
        kept, self._kept = self._kept or [], None
        if self._cuda and kept:
            kept[-1][1].synchronize()
        origin: Any = kept[0][0] if kept else None

        def since(mark: Any) -> float:
            return float(origin.elapsed_time(mark)) if self._cuda else 1e3 * (mark - origin)

        return [Lap(name, since(begin), since(end), late) for begin, end, name, late in kept]

    def start(self) -> None:
        """Set the mark."""
        if self._cuda:
            self._event = self._record()
        else:
            self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last mark to `name` and move the mark here."""
        if self._cuda:
            assert self._event is not None, "start() comes first"
            event = self._record()
            self._pending.append((self._event, event, name))
            if self._kept is not None:
                late = not self._kept or bool(self._kept[-1][1].query())
                self._kept.append((self._event, event, name, late))
            self._event = event
        else:
            now = time.perf_counter()
            self._add(name, now - self._last)
            if self._kept is not None:
                self._kept.append((self._last, now, name, False))
            self._last = now

    def collect(self) -> None:
        """Read the events that the device has passed; never waits."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end, name = self._pending.pop(0)
            self._add(name, begin.elapsed_time(end) / 1000)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, name: str, seconds: float) -> None:
        setattr(self._stats, name, getattr(self._stats, name) + seconds)
