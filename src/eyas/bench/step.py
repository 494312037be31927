"""`eyas bench step`: one decode step, plainly and with drafters, against what the device allows.

Clocks, run one after another in every round so that what slows the machine slows all of them:

    phases     each of verify, accept, expand, draft and commit in a CUDA graph of its own
    logits     the part of accept that is the target's lm_head, once more by itself
    device     the whole step in one graph, alone after a pause
    loop       the engine's own loop (step_loop), and where the GPU waited in it
    sustained  the graph of `device` many times in a row: what lower clocks under load cost without a host

On the CPU the same runs without graphs. Figures are medians over rounds. Kernels may be compiled
before by other processes (step_warm).
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from eyas.bench.floor import Ceilings, floor_ms
from eyas.bench.step_ceilings import measure_ceilings
from eyas.bench.step_floor import draft_work, logits_work, target_work
from eyas.bench.step_method import Method, MethodResult, StepOptions
from eyas.bench.step_models import DrafterSource, open_drafter, open_target
from eyas.bench.step_profile import profile
from eyas.bench.step_warm import jobs_of, warm
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.targets.base import Target

Advance = Callable[[int, int, str], None]
"""Called with (rounds done, rounds in all, what is being timed)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Plain decoding, or one drafter."""

    source: DrafterSource | None
    make: Callable[[], Drafter | None]
    drafter: Drafter | None
    """One that runs nothing, for its shape."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Everything that was measured."""

    target: Target
    contenders: list[Contender]
    options: StepOptions
    warmed: dict[str, Any] | None
    ceilings: Ceilings
    sustained: Ceilings
    ceiling_samples: list[dict[str, float]]
    results: list[MethodResult]


def bench_step(
    target_spec: str,
    drafter_specs: Sequence[str],
    options: StepOptions,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    advance: Advance = lambda *_: None,
    done: Callable[[StepResult], None] = lambda _: None,
) -> StepResult:
    """Measure ceilings, then every batch size, plainly and with every drafter ("none" is no drafter).

    `done` gets the results of each batch size as soon as there are any.
    """
    with options.kernels():
        return _bench_step(target_spec, drafter_specs, options, device, dtype, advance, done)


def _bench_step(
    target_spec: str,
    drafter_specs: Sequence[str],
    options: StepOptions,
    device: torch.device | str,
    dtype: torch.dtype | None,
    advance: Advance,
    done: Callable[[StepResult], None],
) -> StepResult:
    tree = TreeBudget.parse(options.tree) if options.tree else None
    if not options.batch_sizes:
        raise ConfigError("batch_sizes needs at least one value")
    if options.acceptance is not None and not options.acceptance >= 1.0:
        raise ConfigError(f"acceptance={options.acceptance}: a step commits at least 1 token")
    specs = [spec for spec in dict.fromkeys(drafter_specs) if spec not in ("", "none")]
    warmed = None
    if options.warm:
        advance(0, 1, f"compiling in {options.warm} processes")
        warmed = warm(jobs_of(target_spec, specs, options, device, dtype), options.warm)
    target = open_target(target_spec, device=device, dtype=dtype)
    # Before the ceilings, which take half a minute.
    k = None if tree is not None else options.num_draft_tokens
    sources = [open_drafter(spec, target) for spec in specs]
    contenders = [Contender(None, lambda: None, None)]
    contenders += [Contender(one, partial(one.make, k, tree), one.make(k, tree)) for one in sources]
    advance(0, 1, "ceilings")
    if target.device.type == "cuda":
        profile()
    ceilings, sustained, samples = measure_ceilings(target.device, target.dtype, options.ceiling_sizes)
    whole = StepResult(target, contenders, options, warmed, ceilings, sustained, samples, [])
    ways = (options.invariant, not options.invariant) if options.both else (options.invariant,)
    starters = [(contender, way) for contender in contenders for way in ways]
    total, rounds = len(options.batch_sizes) * (options.repeats + 1), 0
    for batch in options.batch_sizes:
        methods = [Method(target, one.make, batch, options, invariant=way) for one, way in starters]
        for turn in range(options.repeats + 1):
            for method in methods:
                method.round(keep=turn > 0)
            rounds += 1
            advance(rounds, total, f"batch {batch}")
        part = replace(whole, results=[])
        for (contender, _), method in zip(starters, methods, strict=True):
            part.results.append(_result(whole, contender, method, batch))
        whole.results.extend(part.results)
        done(part)
        del methods, method
        if target.device.type == "cuda":
            gc.collect()  # engines and their graphs hold each other
            torch.cuda.empty_cache()
    return whole


def _result(whole: StepResult, contender: Contender, method: Method, batch: int) -> MethodResult:
    launches, profiled = method.profiles()
    accepted = median(method.times.tokens_per_step)
    source, context = contender.source, whole.options.context
    floors, sustained = (
        _floors(whole.target, source, contender.drafter, batch, accepted, context, ceilings)
        for ceilings in (whole.ceilings, whole.sustained)
    )
    name, spec = ("plain", None) if source is None else ("draft", source.spec)
    return MethodResult(
        batch, name, spec, method.times, floors, sustained, launches, profiled, method.invariant
    )


def _floors(
    target: Target,
    source: DrafterSource | None,
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
    if drafter is not None and source is not None and source.head is not None:
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
