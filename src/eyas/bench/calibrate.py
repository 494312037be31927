"""`eyas calibrate`: how many drafts, in which shape, pay on this device at each batch size.

    times        a whole step and its verification, for some K and every tree, at each batch size (step_rig)
    acceptance   real decoding of prompts, one run with each of these shapes
    choice       calibrate_choose, written into the head's eyas.json

Times are of steps at one context length, acceptance of greedy decoding; both vary with what is asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from eyas.bench.calibrate_choose import Choice, Shape, chain_lengths, choose, estimates
from eyas.bench.step_clock import Stopwatch
from eyas.bench.step_models import DrafterSource
from eyas.bench.step_rig import make_rig
from eyas.core.device import device_name
from eyas.core.errors import ConfigError
from eyas.core.sampling import SamplingParams
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.drafters.build import MAX_NUM_DRAFT_TOKENS
from eyas.drafters.files import read_json, write_json
from eyas.engine.llm import LLM
from eyas.targets.base import Target

KEY = "calibration"

Advance = Callable[[int, int, str], None]
"""Called with (pieces done, pieces in all, what comes next)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What is timed and decoded."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    ks: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 9, 11, 15)
    """K of the chains that are timed; others are read off between them."""
    trees: tuple[str, ...] = ("3x2x6", "5x2x10", "5x4x16", "5x4x24", "7x4x32", "7x6x48")
    context: int = 1024
    repeats: int = 5
    max_tokens: int = 128
    """Of each answer when acceptance is measured."""
    decode_batch: int = 8

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "ks"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ConfigError(f"{name}={values}: at least one value is needed, each at least 1")
        if max(self.ks) > MAX_NUM_DRAFT_TOKENS:
            raise ConfigError(f"ks={self.ks}: drafters guess 1 to {MAX_NUM_DRAFT_TOKENS} tokens a step")

    @property
    def shapes(self) -> list[Shape]:
        """Everything that is timed: plain decoding, chains, trees."""
        trees = [Shape(TreeBudget.parse(tree).num_draft_tokens, tree) for tree in self.trees]
        return [Shape(0), *(Shape(k) for k in sorted(set(self.ks))), *trees]


@dataclass(slots=True)
class Timing:
    """Milliseconds of one shape at one batch size."""

    step_ms: float
    verify_ms: float


@dataclass(slots=True)
class Calibration:
    """All that was measured, and what follows."""

    device: str
    dtype: str
    context: int
    acceptance_by_depth: list[float]
    """Share of steps with drafts that accepted depth 1, 2, ..., with the longest chain."""
    chain_lengths: dict[int, float]
    """Tokens a step with drafts by K."""
    tree_lengths: dict[Shape, float]
    timings: dict[int, dict[Shape, Timing]] = field(default_factory=dict)
    rates: dict[int, dict[Shape, float]] = field(default_factory=dict)
    """Estimated tokens a second."""
    plain: dict[int, float] = field(default_factory=dict)
    """Tokens a second of plain decoding, without a drafter."""

    @property
    def choices(self) -> list[Choice]:
        """The best shape of each batch size."""
        return choose(self.rates)

    def as_dict(self) -> dict[str, Any]:
        """What stands under "calibration" in eyas.json."""
        verify: dict[str, dict[str, float]] = {}
        for batch, timings in self.timings.items():
            # A chain's time where a chain and a tree have as many rows.
            rows = {s.k + 1: t.verify_ms for s, t in timings.items() if s.tree is not None}
            rows |= {s.k + 1: t.verify_ms for s, t in timings.items() if s.tree is None}
            verify[str(batch)] = {str(count): round(rows[count], 4) for count in sorted(rows)}
        return {
            "device": self.device,
            "dtype": self.dtype,
            "by_batch": [
                asdict(choice)
                | {
                    "tokens_per_second": round(choice.tokens_per_second, 1),
                    "speedup": round(choice.tokens_per_second / self.plain[choice.max_batch], 3),
                }
                for choice in self.choices
            ],
            "verify_ms": verify,
            "context": self.context,
            "acceptance_by_depth": [round(share, 4) for share in self.acceptance_by_depth],
            "chain_acceptance_length": {
                str(k): round(length, 4) for k, length in sorted(self.chain_lengths.items())
            },
            "tree_acceptance_length": {
                str(shape.tree): round(length, 4) for shape, length in self.tree_lengths.items()
            },
        }


def calibrate(
    target: Target,
    source: DrafterSource,
    prompts_ids: Sequence[Sequence[int]],
    options: CalibrateOptions,
    *,
    advance: Advance = lambda *_: None,
) -> Calibration:
    """Decode the prompts, time the steps, and estimate every shape at every batch size."""
    if not prompts_ids:
        raise ConfigError("prompts: at least one is needed to measure what is accepted")
    shapes = options.shapes
    trees = [shape for shape in shapes if shape.tree is not None]
    batch_sizes = sorted(set(options.batch_sizes))
    total, done = len(shapes) - 1 + len(batch_sizes) * (len(shapes) + 1), 0

    def tick(what: str) -> None:
        nonlocal done
        advance(done, total, what)
        done += 1

    shares: dict[Shape, list[float]] = {}
    for shape in shapes:
        if shape.k:
            tick(f"decoding with {_name(shape)}")
            shares[shape] = _decode(target, source, shape, prompts_ids, options)
    lengths = {shape: 1.0 + sum(by_depth) for shape, by_depth in shares.items()}
    measured = {shape.k: length for shape, length in lengths.items() if shape.tree is None}
    tree_lengths = {shape: lengths[shape] for shape in trees}
    by_depth = shares[Shape(max(options.ks))]
    found = Calibration(
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        context=options.context,
        acceptance_by_depth=by_depth,
        chain_lengths=measured,
        tree_lengths=tree_lengths,
    )
    for batch in batch_sizes:
        tick(f"batch {batch}, plain")
        found.plain[batch] = 1e3 * batch / _time(target, None, batch, options).step_ms
        timings = found.timings[batch] = {}
        for shape in shapes:
            tick(f"batch {batch}, {_name(shape)}")
            drafter = _drafter(source, shape)
            timings[shape] = _time(target, drafter, batch, options, keep_only=shape.k == 0)
        found.rates[batch] = estimates(
            batch,
            {shape.k: timings[shape].step_ms for shape in shapes if shape.tree is None},
            chain_lengths(by_depth, measured),
            {shape: timings[shape].step_ms for shape in trees},
            tree_lengths,
        )
    advance(total, total, "done")
    return found


def write_calibration(head: Path, calibration: Calibration) -> None:
    """Put a calibration into a head's eyas.json, keeping everything else that stands there."""
    path = head / "eyas.json"
    values = read_json(path) if path.exists() else {}
    write_json(path, values | {KEY: calibration.as_dict()})


def _drafter(source: DrafterSource, shape: Shape) -> Drafter | None:
    if shape.tree is not None:
        return source.make(None, TreeBudget.parse(shape.tree))
    return source.make(max(shape.k, 1), None)


def _decode(
    target: Target,
    source: DrafterSource,
    shape: Shape,
    prompts_ids: Sequence[Sequence[int]],
    options: CalibrateOptions,
) -> list[float]:
    """Share of the steps with drafts that accepted depth 1, 2, ..."""
    longest = max(map(len, prompts_ids))
    limit = target.config.max_position_embeddings
    llm = LLM(
        target,
        _drafter(source, shape),
        max_num_seqs=options.decode_batch,
        max_model_len=min(limit, longest + options.max_tokens + shape.k + 1),
    )
    llm.generate_ids(prompts_ids, SamplingParams(temperature=0.0, max_tokens=options.max_tokens))
    stats = llm.stats
    if not stats.drafted_row_steps:
        raise ConfigError("the prompts end before anything is drafted: give longer answers (max_tokens)")
    return stats.acceptance_by_depth


def _time(
    target: Target,
    drafter: Drafter | None,
    batch: int,
    options: CalibrateOptions,
    *,
    keep_only: bool = False,
) -> Timing:
    """Medians of a whole step and of its verification; `keep_only` drafts nothing (k = 0)."""
    rig = make_rig(target, drafter, batch=batch, context=options.context)
    if keep_only:
        rig.variant = rig.variant._replace(num_drafts=0)
        rig.warm()
    whole = Stopwatch([rig.step], target.device, restore=rig.restore)
    verify = Stopwatch(rig.phases()[:1], target.device, restore=rig.restore)
    rounds = [(whole.round()[0], verify.round()[0]) for _ in range(options.repeats + 1)][1:]
    return Timing(median(step for step, _ in rounds), median(one for _, one in rounds))


def _name(shape: Shape) -> str:
    return f"tree {shape.tree}" if shape.tree else f"K = {shape.k}"
