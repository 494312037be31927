"""`eyas bench step`: one decode step, plainly and with a drafter, against what the device allows.

Three clocks, run one after another in every round so that what slows the machine slows all of them:

    phases   each of verify, accept, expand, draft and commit in a CUDA graph of its own
    logits   the part of accept that is the target's lm_head, once more by itself
    device   the whole step in one graph
    loop     the engine's own loop (step_loop): the difference to `device` is where the GPU waited

On the CPU the same runs without graphs. Figures are medians over rounds.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from eyas.bench.floor import Ceilings, floor_ms
from eyas.bench.step_ceilings import CeilingSizes, measure_ceilings
from eyas.bench.step_clock import Stopwatch
from eyas.bench.step_floor import draft_work, logits_work, target_work
from eyas.bench.step_loop import StepLoop
from eyas.bench.step_models import DrafterSource, open_drafter, open_target
from eyas.bench.step_profile import Profile, profile
from eyas.bench.step_rig import PHASES, StepRig, make_rig
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.kernels.settings import settings, use_invariant, use_pdl
from eyas.targets.base import Target

Advance = Callable[[int, int, str], None]
"""Called with (rounds done, rounds in all, what is being timed)."""


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
    pdl: bool | None = None
    """Programmatic dependent launch; None for the kernels' own default."""


@dataclass(slots=True)
class MethodTimes:
    """Milliseconds of one method at one batch size, a value a round."""

    phases: list[list[float]] = field(default_factory=list)
    """One list for each round, in the order of PHASES."""
    logits: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
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
    times: MethodTimes
    floors: dict[str, float | None]
    launches: dict[str, int]
    """By phase; empty on the CPU."""
    profile: Profile | None
    """Of the whole step in one graph."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that was measured."""

    target: Target
    source: DrafterSource
    drafter: Drafter | None
    options: StepOptions
    ceilings: Ceilings
    ceiling_samples: list[dict[str, float]]
    results: list[MethodResult]


class _Method:
    """One method's rig, clocks and engine at one batch size."""

    def __init__(
        self, target: Target, make: Callable[[], Drafter | None], batch: int, options: StepOptions
    ) -> None:
        shared = {"batch": batch, "context": options.context, "acceptance": options.acceptance}
        self.rig: StepRig = make_rig(target, make(), **shared)  # type: ignore[arg-type]
        self.phases = Stopwatch(self.rig.phases(), target.device, restore=self.rig.restore)
        self.logits = Stopwatch([self.rig.logits], target.device)
        self.whole = Stopwatch([self.rig.step], target.device, restore=self.rig.restore)
        self.loop = StepLoop(target, make(), num_steps=options.num_steps, **shared)  # type: ignore[arg-type]
        self.times = MethodTimes()

    def round(self, *, keep: bool) -> None:
        """Run every clock once."""
        phases, logits = self.phases.round(), self.logits.round()[0]
        device, loop = self.whole.round()[0], self.loop.run()
        if keep:
            self.times.phases.append(phases)
            self.times.logits.append(logits)
            self.times.device.append(device)
            self.times.loop.append(loop.step_ms)
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


def bench_step(
    target_spec: str,
    drafter_spec: str,
    options: StepOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    advance: Advance = lambda *_: None,
) -> StepResult:
    """Measure ceilings, then every batch size, plainly and (unless the drafter is "none") with drafts."""
    pdl = settings.pdl if options.pdl is None else options.pdl
    with use_invariant(options.invariant), use_pdl(pdl):
        return _bench_step(target_spec, drafter_spec, options, device, dtype, advance)


def _bench_step(
    target_spec: str,
    drafter_spec: str,
    options: StepOptions,
    device: torch.device | str,
    dtype: torch.dtype | None,
    advance: Advance,
) -> StepResult:
    tree = TreeBudget.parse(options.tree) if options.tree else None
    if not options.batch_sizes:
        raise ConfigError("batch_sizes needs at least one value")
    if options.acceptance is not None and not options.acceptance >= 1.0:
        raise ConfigError(f"acceptance={options.acceptance}: a step commits at least 1 token")
    target = open_target(target_spec, device=device, dtype=dtype)
    # Before the ceilings, which take half a minute.
    source = open_drafter(drafter_spec, target)
    advance(0, 1, "ceilings")
    if target.device.type == "cuda":
        profile()
    ceilings, samples = measure_ceilings(target.device, target.dtype, options.ceiling_sizes)
    k = None if tree is not None else options.num_draft_tokens
    names: list[tuple[str, Callable[[], Drafter | None]]] = [("plain", lambda: None)]
    drafter = None
    if drafter_spec not in ("", "none"):
        drafter = source.make(k, tree)
        names.append(("draft", lambda: source.make(k, tree)))
    results = []
    total, done = len(options.batch_sizes) * (options.repeats + 1), 0
    for batch in options.batch_sizes:
        methods = {name: _Method(target, make, batch, options) for name, make in names}
        for turn in range(options.repeats + 1):
            for method in methods.values():
                method.round(keep=turn > 0)
            done += 1
            advance(done, total, f"batch {batch}")
        for name, method in methods.items():
            launches, whole = method.profiles()
            own = drafter if name == "draft" else None
            accepted = median(method.times.tokens_per_step)
            floors = _floors(target, source, own, batch, accepted, options.context, ceilings)
            results.append(MethodResult(batch, name, method.times, floors, launches, whole))
        del methods, method
        if target.device.type == "cuda":
            gc.collect()  # engines and their graphs hold each other
            torch.cuda.empty_cache()
    return StepResult(target, source, drafter, options, ceilings, samples, results)


def _floors(
    target: Target,
    source: DrafterSource,
    drafter: Drafter | None,
    batch: int,
    accepted: float,
    context: int,
    ceilings: Ceilings,
) -> dict[str, float | None]:
    """The floor of every phase in ms; expand and commit need nothing that counts."""
    size = target.dtype.itemsize
    rows = 1 if drafter is None else drafter.tree.num_nodes
    verify = target_work(target.config, num_requests=batch, rows=rows, context=context, itemsize=size)
    logits = logits_work(target.config, num_requests=batch, rows=rows, itemsize=size)
    draft: float | None = 0.0
    if drafter is not None and source.head is not None:
        work = draft_work(
            source.head.config,
            drafter.tree,
            num_requests=batch,
            accepted=accepted,
            context=context,
            itemsize=size,
        )
        draft = floor_ms(work, ceilings)
    elif drafter is not None and drafter.kv_layout is not None:
        draft = None
    return {
        "verify": floor_ms(verify, ceilings),
        "accept": floor_ms([logits], ceilings),
        "expand": 0.0,
        "draft": draft,
        "commit": 0.0,
    }
