"""One method (a drafter, or none) at one batch size: the clocks of `eyas bench step` and what they showed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from eyas.bench.step_ceilings import CeilingSizes
from eyas.bench.step_clock import Stopwatch
from eyas.bench.step_loop import StepLoop
from eyas.bench.step_profile import Profile, profile
from eyas.bench.step_rig import PHASES, StepRig, make_rig
from eyas.drafters.base import Drafter
from eyas.kernels.settings import Pdl, settings, use_invariant, use_pdl
from eyas.targets.base import Target

_REST_SECONDS = 0.1
"""After the load of the method before: clocks are up again when phases and the step alone are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What is timed; `acceptance` is the mean of tokens a step, bonus included, None for what comes."""

    num_draft_tokens: int = 7
    tree: str | None = None
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    context: int = 1024
    acceptance: float | None = None
    num_steps: int = 32
    repeats: int = 5
    ceiling_sizes: CeilingSizes | None = None
    invariant: bool = True
    """Kernels that give a row the same bits in every batch (kernels/settings)."""
    both: bool = False
    """Time every method with these kernels and without, in turn."""
    pdl: Pdl | None = None
    """Programmatic dependent launch; None for the kernels' own default, late where the GPU has it."""
    warm: int = 0
    """Processes that compile kernels before anything is measured (step_warm); 0: none."""

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Set the kernels' switches inside the block."""
        with use_invariant(self.invariant), use_pdl(self.pdl or settings.pdl):
            yield


@dataclass(slots=True)
class MethodTimes:
    """Milliseconds of one method at one batch size, a value a round."""

    phases: list[list[float]] = field(default_factory=list)
    """One list for each round, in the order of PHASES."""
    logits: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    sustained: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    replay: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)

    def phase_ms(self, phase: str) -> float:
        """Median of one phase."""
        return median(times[PHASES.index(phase)] for times in self.phases)


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method at one batch size. The floor of a phase is None where it is not known (small models)."""

    batch: int
    method: str
    """"plain" or "draft"."""
    drafter: str | None
    """What --drafter named."""
    times: MethodTimes
    floors: dict[str, float | None]
    sustained_floors: dict[str, float | None]
    """By ceilings under sustained load."""
    launches: dict[str, int]
    """By phase; empty on the CPU."""
    profile: Profile | None
    """Of the whole step in one graph."""
    invariant: bool


class Method:
    """One method's rig, clocks and engine at one batch size; `invariant` None: as the options say."""

    def __init__(
        self,
        target: Target,
        make: Callable[[], Drafter | None],
        batch: int,
        options: StepOptions,
        *,
        invariant: bool | None = None,
    ) -> None:
        self.invariant = options.invariant if invariant is None else invariant
        self._num_steps = options.num_steps
        shared = {"batch": batch, "context": options.context, "acceptance": options.acceptance}
        with use_invariant(self.invariant):
            self.rig: StepRig = make_rig(target, make(), **shared)  # type: ignore[arg-type]
            self.phases = Stopwatch(self.rig.phases(), target.device, restore=self.rig.restore)
            self.logits = Stopwatch([self.rig.logits], target.device)
            self.whole = Stopwatch([self.rig.step], target.device, restore=self.rig.restore)
            self.loop = StepLoop(target, make(), num_steps=options.num_steps, **shared)  # type: ignore[arg-type]
        self.times = MethodTimes()

    def round(self, *, keep: bool) -> None:
        """Run every clock once."""
        if self.rig.state.device.type == "cuda":
            time.sleep(_REST_SECONDS)
        with use_invariant(self.invariant):  # the loop captures its graphs as it comes to them
            phases, logits = self.phases.round(), self.logits.round()[0]
            device, loop = self.whole.round()[0], self.loop.run()
            sustained = self.whole.in_a_row(self._num_steps)
        if keep:
            self.times.phases.append(phases)
            self.times.logits.append(logits)
            self.times.device.append(device)
            self.times.sustained.append(sustained)
            self.times.loop.append(loop.step_ms)
            self.times.replay.append(loop.replay_ms)
            self.times.gap.append(loop.gap_ms)
            self.times.idle.append(loop.idle_share)
            self.times.late.append(loop.num_late)
            self.times.tokens_per_step.append(loop.tokens_per_step)

    def profiles(self) -> tuple[dict[str, int], Profile | None]:
        """Launches of each phase, and the profile of the whole; nothing on the CPU."""
        if self.rig.state.device.type != "cuda":
            return {}, None
        self.rig.restore()
        launches = {
            phase: profile(graph.replay).launches
            for phase, graph in zip(PHASES, self.phases.graphs, strict=True)
        }
        self.rig.restore()
        return launches, profile(self.whole.graphs[0].replay)
