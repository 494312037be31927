"""From samples to the numbers of a comparison; pure functions, no engine, no clock.

A sample is one prompt batch answered once by one method. All methods answer the same batch right after one
another, round after round, so slow drifts of a machine (heat, neighbours) touch all alike; the speedup of a
round is a ratio of two sums taken within it, and the figure reported is the median over rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from eyas.core.outputs import acceptance_length


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch of prompts, answered once. Times in seconds, counts summed over the batch."""

    method: str
    round: int
    prompt_ids: tuple[str, ...]
    seconds: float
    """Wall time of the whole call, prefill included."""
    tokens: int
    """Output tokens that were kept."""
    steps: int
    """Target forwards of decoding, counted per request (a batch of 4 for 10 steps counts 40)."""
    accepted_by_depth: tuple[int, ...]
    """How many steps accepted a draft at depth i (0-based)."""
    draft_steps: int
    """Those of `steps` that verified drafts."""
    token_ids: tuple[tuple[int, ...], ...] = field(repr=False, default=())
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    overhead_seconds: float = 0.0
    batch_steps: int = 0
    """Steps of the engine in this call, however many requests each had."""


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One row of the table; docs/benchmarks/compare-json.md says what each field means."""

    name: str
    spec: str | None
    num_draft_tokens: int
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float
    acceptance_length: float
    tokens_per_forward: float
    acceptance_by_depth: list[float]
    conditional_acceptance_by_depth: list[float]
    verify_ms: float
    draft_ms: float
    overhead_ms: float
    num_steps: int
    num_tokens: int
    identical: bool
    num_identical: int
    num_answers: int


def summarize(
    name: str, spec: str | None, num_draft_tokens: int, samples: Sequence[Sample], plain: Sequence[Sample]
) -> MethodResult:
    """Return the row of one method; `plain` are the samples of plain decoding in the same run.

    Example: two rounds, method seconds [2, 3], plain seconds [4, 4.5], as many tokens each:
        ratios [2.0, 1.5] -> speedup 1.75, low 1.5, high 2.0
    """
    ratios = [
        _rate([s for s in samples if s.round == turn]) / _rate([s for s in plain if s.round == turn])
        for turn in sorted({s.round for s in samples})
    ]
    steps, draft_steps = sum(s.steps for s in samples), sum(s.draft_steps for s in samples)
    # As many depths as K, fewer in a tree.
    depth = max((len(s.accepted_by_depth) for s in samples), default=0)
    accepted = [sum(s.accepted_by_depth[i] for s in samples) for i in range(depth)]
    engine_steps = max(1, sum(s.batch_steps for s in samples))
    answers, same = _identical(samples, plain)
    return MethodResult(
        name=name,
        spec=spec,
        num_draft_tokens=num_draft_tokens,
        tokens_per_second=_rate(samples),
        speedup=median(ratios),
        speedup_low=min(ratios),
        speedup_high=max(ratios),
        acceptance_length=acceptance_length(steps, draft_steps, sum(accepted)),
        tokens_per_forward=sum(s.tokens for s in samples) / steps if steps else 0.0,
        acceptance_by_depth=[count / max(draft_steps, 1) for count in accepted],
        conditional_acceptance_by_depth=conditional(accepted, draft_steps),
        verify_ms=1e3 * sum(s.verify_seconds for s in samples) / engine_steps,
        draft_ms=1e3 * sum(s.draft_seconds for s in samples) / engine_steps,
        overhead_ms=1e3 * sum(s.overhead_seconds for s in samples) / engine_steps,
        num_steps=steps,
        num_tokens=sum(s.tokens for s in samples),
        identical=same == answers,
        num_identical=same,
        num_answers=answers,
    )


def conditional(accepted: Sequence[int], steps: int) -> list[float]:
    """Return P(depth i accepted | depth i-1 accepted); depth 0 is conditioned on nothing.

    >>> conditional([80, 40, 30], 100)
    [0.8, 0.5, 0.75]
    """
    before = [steps, *accepted][: len(accepted)]
    return [count / reached if reached else 0.0 for count, reached in zip(accepted, before, strict=True)]


def best_per_spec(results: Sequence[MethodResult]) -> list[MethodResult]:
    """Return, for each drafter, its row with the highest speedup, in the order of appearance."""
    best: dict[str, MethodResult] = {}
    for row in results:
        if row.spec is not None and (row.spec not in best or row.speedup > best[row.spec].speedup):
            best[row.spec] = row
    return list(best.values())


def _rate(samples: Sequence[Sample]) -> float:
    seconds = sum(s.seconds for s in samples)
    return sum(s.tokens for s in samples) / seconds if seconds else 0.0


def _identical(samples: Sequence[Sample], plain: Sequence[Sample]) -> tuple[int, int]:
    """Return (answers, answers whose token ids equal plain decoding's in the same round)."""
    expected = {
        (s.round, prompt): ids for s in plain for prompt, ids in zip(s.prompt_ids, s.token_ids, strict=True)
    }
    pairs = [
        (expected[s.round, prompt], ids)
        for s in samples
        for prompt, ids in zip(s.prompt_ids, s.token_ids, strict=True)
    ]
    return len(pairs), sum(left == right for left, right in pairs)
