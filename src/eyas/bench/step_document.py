"""The JSON of `eyas bench step`; docs/benchmarks/bench-step-json.md says what each field means."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from eyas.bench.step import StepResult
from eyas.bench.step_method import MethodResult
from eyas.bench.step_rig import PHASES
from eyas.kernels.settings import settings

SCHEMA = "eyas.bench-step/1"
FORWARDS = ("verify", "draft")
"""Phases that run a model; `other_share` is that of the others, without the target's lm_head in accept."""


def step_document(result: StepResult, provenance: dict[str, Any]) -> dict[str, Any]:
    """Plain JSON values: what ran, ceilings, and each method at each batch size."""
    options = result.options
    drafted = [one for one in result.contenders if one.source is not None and one.drafter is not None]
    first = drafted[0] if drafted else None
    return {
        "schema": SCHEMA,
        "setup": {
            "target": result.target.identity.name,
            "drafter": first.source.spec if first and first.source else None,
            "drafters": [one.source.spec for one in drafted if one.source],
            "num_draft_tokens": first.drafter.num_draft_tokens if first and first.drafter else 0,
            "tree": options.tree,
            "device": str(result.target.device),
            "dtype": str(result.target.dtype).removeprefix("torch."),
            "context": options.context,
            "acceptance": options.acceptance,
            "num_steps": options.num_steps,
            "repeats": options.repeats,
            "invariant": options.invariant,
            "both": options.both,
            "pdl": options.pdl or settings.pdl,
        },
        "warm": result.warmed,
        "ceilings": asdict(result.ceilings)
        | {"sustained": asdict(result.sustained), "samples": result.ceiling_samples},
        "results": [_method(one) | _cost(one, result.results) for one in result.results],
        "provenance": provenance,
    }


def _method(one: MethodResult) -> dict[str, Any]:
    times = one.times
    phases = {phase: times.phase_ms(phase) for phase in PHASES}
    device_ms, loop_ms = median(times.device), median(times.loop)
    floor, sustained_floor = _sum(one.floors), _sum(one.sustained_floors)
    tokens = median(times.tokens_per_step)
    logits = min(median(times.logits), phases["accept"])
    others = sum(ms for phase, ms in phases.items() if phase not in FORWARDS) - logits
    return {
        "batch": one.batch,
        "method": one.method,
        "drafter": one.drafter,
        "invariant": one.invariant,
        "phases": [
            {
                "phase": phase,
                "ms": ms,
                "floor_ms": one.floors[phase],
                "ratio": _ratio(ms, one.floors[phase]),
                "launches": one.launches.get(phase),
            }
            for phase, ms in phases.items()
        ],
        "step": {
            "logits_ms": median(times.logits),
            "device_ms": device_ms,
            "loop_ms": loop_ms,
            "floor_ms": floor,
            "device_ratio": _ratio(device_ms, floor),
            "loop_ratio": _ratio(loop_ms, floor),
            "other_share": others / sum(phases.values()),
            "idle_share": 1.0 - device_ms / loop_ms,
            "sustained_ms": median(times.sustained),
            "replay_ms": median(times.replay),
            "gap_ms": median(times.gap),
            "gap_share": median(times.idle),
            "num_late": sum(times.late),
            "floor_sustained_ms": sustained_floor,
            "loop_ratio_sustained": _ratio(loop_ms, sustained_floor),
            "launches": None if one.profile is None else one.profile.launches,
            "busy_share_profiled": (
                None
                if one.profile is None or not one.profile.span_ms
                else one.profile.busy_ms / one.profile.span_ms
            ),
            "tokens_per_step": tokens,
            "tokens_per_second": 1e3 * one.batch * tokens / loop_ms,
        },
        "kernels": [] if one.profile is None else [asdict(kernel) for kernel in one.profile.kernels],
        "samples": {
            "phases_ms": times.phases,
            "logits_ms": times.logits,
            "device_ms": times.device,
            "sustained_ms": times.sustained,
            "loop_ms": times.loop,
            "replay_ms": times.replay,
            "gap_ms": times.gap,
            "tokens_per_step": times.tokens_per_step,
        },
    }


def _cost(one: MethodResult, results: Sequence[MethodResult]) -> dict[str, Any]:
    """What invariance adds to a step, as a share, where both ways were timed."""
    for other in results:
        same = (other.batch, other.drafter) == (one.batch, one.drafter)
        if same and one.invariant and not other.invariant:
            device = median(one.times.device) / median(other.times.device)
            loop = median(one.times.loop) / median(other.times.loop)
            return {"invariance_cost": {"device": device - 1.0, "loop": loop - 1.0}}
    return {"invariance_cost": None}


def _sum(floors: Mapping[str, float | None]) -> float | None:
    """Of all phases; None if one is not known."""
    known = [floor for floor in floors.values() if floor is not None]
    return sum(known) if len(known) == len(floors) else None


def _ratio(ms: float, floor: float | None) -> float | None:
    return ms / floor if floor else None
