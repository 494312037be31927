"""Counters of speculation and of steps, from the engine at hand or from an endpoint's /metrics.

Counters only grow; what a cell measured is the difference of two readings.

    acceptance_length   1 + accepted / drafts    tokens per verification of drafts, the target's own included
    tokens_per_forward  committed / row_steps    the same over ALL forwards, those without drafts too

The first is what `vllm bench serve` prints and every engine can tell; the second is the one that throughput
follows from, where the engine counts its steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from eyas.bench.analyze import conditional


@dataclass(slots=True)
class Counters:
    """Totals; what an engine does not tell stays 0."""

    drafts: float = 0
    """Row steps that verified at least one draft."""
    draft_tokens: float = 0
    accepted: float = 0
    accepted_by_position: list[float] = field(default_factory=list)
    steps: float = 0
    """Forwards of the target, whatever the batch."""
    row_steps: float = 0
    committed: float = 0
    prefill_tokens: float = 0
    prefill_seconds: float = 0
    verify_seconds: float = 0
    draft_seconds: float = 0

    @classmethod
    def of_stats(cls, stats: Mapping[str, Any]) -> Self:
        """Read an engine's own statistics."""
        names = {
            "drafts": "drafted_row_steps",
            "draft_tokens": "drafted",
            "accepted_by_position": "accepted_by_depth",
        }
        own = {f.name: stats.get(names.get(f.name, f.name)) for f in fields(cls)}
        return cls(**{name: value for name, value in own.items() if value is not None})

    @classmethod
    def of_metrics(cls, text: str) -> Self | None:
        """Read a Prometheus page with vLLM's names, or Eyas's; None if it counts no tokens of either."""
        samples = _samples(text)
        names: dict[str, tuple[str, ...]] = {
            "drafts": ("vllm:spec_decode_num_drafts",),
            "draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
            "accepted": ("vllm:spec_decode_num_accepted_tokens",),
            "steps": ("eyas_engine_steps", "vllm:iteration_tokens_total_count"),
            "committed": ("eyas_generation_tokens", "vllm:generation_tokens"),
            "prefill_tokens": ("eyas_prefill_tokens", "vllm:prompt_tokens"),
            "prefill_seconds": ("eyas_engine_prefill_seconds",),
            "verify_seconds": ("eyas_engine_verify_seconds",),
            "draft_seconds": ("eyas_engine_draft_seconds",),
        }
        values: dict[str, float] = {}
        for field_name, choices in names.items():
            for name in choices:
                found = [v for key, _, v in samples if key.removesuffix("_total") == name]
                if found:
                    values[field_name] = sum(found)
                    break
        if "drafts" not in values and "committed" not in values:
            return None
        by_position: dict[int, float] = {}
        for key, labels, value in samples:
            if key.removesuffix("_total") == "vllm:spec_decode_num_accepted_tokens_per_pos":
                position = int(labels["position"])
                by_position[position] = by_position.get(position, 0.0) + value
        depth = max(by_position, default=-1) + 1
        return cls(accepted_by_position=[by_position.get(i, 0.0) for i in range(depth)], **values)

    def __sub__(self, before: Self) -> "Counters":
        """Return what was counted since `before`."""
        earlier = before.accepted_by_position
        depth = len(self.accepted_by_position)
        earlier = [*earlier, *[0.0] * (depth - len(earlier))][:depth]
        positions = [a - b for a, b in zip(self.accepted_by_position, earlier, strict=True)]
        rest = {
            f.name: getattr(self, f.name) - getattr(before, f.name)
            for f in fields(self)
            if f.name != "accepted_by_position"
        }
        return Counters(accepted_by_position=positions, **rest)

    def summary(self) -> dict[str, Any]:
        """Return acceptance as plain JSON values; empty where nothing was drafted."""
        if not self.drafts:
            return {}
        return {
            "acceptance_length": 1 + self.accepted / self.drafts,
            "acceptance_by_position": [count / self.drafts for count in self.accepted_by_position],
            "conditional_acceptance_by_position": conditional(
                [int(count) for count in self.accepted_by_position], int(self.drafts)
            ),
            "num_drafts": self.drafts,
            "num_draft_tokens": self.draft_tokens,
            "num_accepted": self.accepted,
        }

    def step_summary(self, seconds: float) -> dict[str, Any]:
        """Return where the time of a window of `seconds` went, per step; empty where no steps are counted.

        tokens a second = rows_per_step * tokens_per_forward / step time, exactly: step_ms is the window over
        its steps, prefill and waiting included; the parts are verify, draft, prefill and the rest, where the
        engine tells verification and drafting apart.
        """
        if not self.steps or not self.row_steps or seconds <= 0:
            return {}
        parts = {"prefill_ms": self.prefill_seconds}
        if self.verify_seconds or self.draft_seconds:
            parts = {"verify_ms": self.verify_seconds, "draft_ms": self.draft_seconds} | parts
            parts["other_ms"] = max(0.0, seconds - sum(parts.values()))
        return {
            "num_steps": self.steps,
            "rows_per_step": self.row_steps / self.steps,
            "tokens_per_forward": self.committed / self.row_steps,
            "step_ms": 1e3 * seconds / self.steps,
            **{name: 1e3 * value / self.steps for name, value in parts.items()},
        }


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return (name, labels, value) of every sample of a Prometheus page; other lines are skipped."""
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        head, brace, rest = line.partition("{")
        inside, _, tail = rest.rpartition("}") if brace else ("", "", line.partition(" ")[2])
        name = head if brace else line.partition(" ")[0]
        labels = {}
        for part in inside.split(","):
            key, equals, value = part.partition("=")
            if equals:
                labels[key.strip()] = value.strip().strip('"')
        try:
            found.append((name.strip(), labels, float(tail.split()[0])))
        except (ValueError, IndexError):
            continue
    return found
