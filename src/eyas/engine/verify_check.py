"""Is a drafter lossless on this target, on this machine? What `eyas verify` runs.

Three kinds of check:

- greedy, for every K: committed tokens equal plain decoding's, token by token, at several batch sizes; with
  `plain_batches` plain decoding at these sizes too (K = 0).
- seeded (temperature > 0, point-mass drafts), for every K: the same, for the same seeds. Every row's choice
  is one draw keyed by (seed, position), so a drafter may not change a single token.
- distribution (temperature > 0): over many seeds, the joint distribution of the first three tokens against
  the target's own, computed without the engine (engine/exact.py), by a chi-square test. Only two of these
  tokens have drafts before them, so one K is enough: the smallest from 2 up.

Equality is judged at the first difference of two outputs (what follows has another context). In float32,
and for chains on kernels that are batch-invariant, any greedy difference fails. Where rounding of 16-bit
numbers can part answers (trees; chains where a forward over 8 rows need not give the bits of a forward over
1), one passes as a near tie if its two tokens are as close under the target itself as rounding explains
(engine/first_difference.py). Seeded outputs have a near tie where the random number falls beside the border
of two tokens. Every difference is in the report.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eyas.core.errors import ConfigError
from eyas.core.outputs import acceptance_length
from eyas.core.sampling import SamplingParams
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.engine.exact import cell_of, token_tree
from eyas.engine.first_difference import Difference, Outputs, greedy_difference, seeded_difference, summary
from eyas.engine.kv_cache import CPU_PAGE_SIZE, CUDA_PAGE_SIZE
from eyas.engine.llm import LLM
from eyas.engine.side_by_side import SideBySide
from eyas.targets.base import Target
from eyas.verify.chi_square import chi_square

DrafterSpec = str | Path | Callable[[Any], Drafter]
"""What LLM takes as drafter, or a function that builds one for K."""

FULL = 16
"""Batches from here on fill a device: one engine runs them."""
FIRST_TOKENS = 3
"""Depth of the joint distribution. The first token has no drafts before it; the next two do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    kind: str
    """"greedy", "seeded" or "distribution"."""
    num_draft_tokens: int
    temperature: float
    passed: bool
    detail: str
    """What was compared and what came out, for people."""
    acceptance_length: float
    tokens: int = 0
    """Output tokens compared (greedy, seeded) or outputs drawn (distribution)."""
    outputs: int = 0
    """Answers compared (greedy, seeded): prompts times batch sizes."""
    tree: str | None = None
    """As TreeBudget.parse reads it; None for chains."""
    near_ties: int = 0
    """Outputs that part at a tie within rounding."""
    different: int = 0
    """Outputs that part for another reason."""
    differences: tuple[Difference, ...] = ()
    """Every answer that parts, near tie or not."""
    statistic: float | None = None
    degrees: int | None = None
    p_value: float | None = None


@dataclass(slots=True)
class LosslessReport:
    """All checks; `passed` if every one of them did."""

    target: str
    drafter: str
    device: str
    dtype: str
    alpha: float
    """A correct engine fails a distribution check with this probability."""
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How much is tried."""

    num_draft_tokens: tuple[int, ...] = (1, 3, 7)
    trees: tuple[TreeBudget, ...] = ()
    """Trees to be checked as well; heads only."""
    batch_sizes: tuple[int, ...] = (1, 4)
    temperatures: tuple[float, ...] = (1.0,)
    num_tokens: int = 48
    """Output tokens of each prompt in the equality checks."""
    samples: int = 500
    """Seeds of each distribution check; 0 leaves those out."""
    sample_prompt_tokens: int = 8
    """The distribution checks prefill so many tokens, the last of the first prompt, once for every seed."""
    num_top: int = 4
    """Likeliest tokens that have a cell of their own after each prefix."""
    sample_drafts: bool = False
    """Draw drafts and verify by the rejection rule; equality by seed then does not hold and is left out."""
    alpha: float = 1e-4
    seed: int = 0
    engines: int = 1
    """Engines side by side where batches are small (below FULL): on a GPU these answer sooner so."""
    plain_batches: bool = False
    """Hold plain decoding at every batch size against that at the largest, too."""

    def __post_init__(self) -> None:
        rules = (
            ("num_draft_tokens", all(k >= 1 for k in self.num_draft_tokens), "at least 1 each"),
            ("batch_sizes", all(size >= 1 for size in self.batch_sizes), "at least 1 each"),
            ("temperatures", all(t > 0 for t in self.temperatures), "above 0 (greedy is always checked)"),
            ("num_tokens", self.num_tokens >= 1, "at least 1"),
            ("engines", self.engines >= 1, "at least 1"),
            ("samples", self.samples >= 0, "0 (none) or more"),
            ("sample_prompt_tokens", self.sample_prompt_tokens >= 1, "at least 1"),
            ("num_top", self.num_top >= 1, "at least 1"),
            ("alpha", 0.0 < self.alpha < 1.0, "between 0 and 1"),
        )
        for name, good, rule in rules:
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)!r} is out of range: it must be {rule}")
        if not (self.num_draft_tokens or self.trees) or not self.batch_sizes:
            raise ConfigError("num_draft_tokens (or trees) and batch_sizes need at least one value each")


def check_lossless(
    target: Target,
    drafter: DrafterSpec,
    prompts_ids: Sequence[Sequence[int]],
    options: CheckOptions | None = None,
    *,
    progress: Callable[[Check], None] | None = None,
) -> LosslessReport:
    """Hold a drafter against plain decoding and against the target's own distribution.

    Args:
        target: loaded target; all engines share its weights.
        drafter: spec, or a function from K (or a TreeBudget, where options name trees) to a Drafter.
        prompts_ids: token ids of the prompts; the distribution checks use the end of the first one.
        options: how much is tried.
        progress: called after every check.
    """
    options = options or CheckOptions()
    if not prompts_ids or not all(prompts_ids):
        raise ConfigError("prompts: at least one prompt is needed, and none may be empty")
    report = LosslessReport(
        target=target.identity.name,
        drafter=getattr(drafter, "__name__", str(drafter)),
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        alpha=options.alpha,
    )
    for check in _checks(target, drafter, [list(ids) for ids in prompts_ids], options):
        report.checks.append(check)
        if progress is not None:
            progress(check)
    return report


def num_checks(options: CheckOptions) -> int:
    """How many checks `check_lossless` will make."""
    num_temperatures = len(options.temperatures)
    equality = 1 if options.sample_drafts else 1 + num_temperatures
    num_shapes = len(options.num_draft_tokens) + len(options.trees)
    num_distributions = bool(options.num_draft_tokens) + len(options.trees)
    return (
        options.plain_batches
        + num_shapes * equality
        + (num_temperatures * num_distributions if options.samples else 0)
    )


def _distribution_drafts(options: CheckOptions) -> int:
    """K of the distribution checks."""
    return min((k for k in options.num_draft_tokens if k >= 2), default=1)


def _checks(
    target: Target, drafter: DrafterSpec, prompts: list[list[int]], options: CheckOptions
) -> Iterator[Check]:
    size = max(options.batch_sizes)
    shapes: list[int | TreeBudget] = [*options.num_draft_tokens, *options.trees]
    most = max([*options.num_draft_tokens, *(tree.num_draft_tokens for tree in options.trees)])
    longest = max(map(len, prompts)) + options.num_tokens + most + 1
    limit = min(target.config.max_position_embeddings, max(longest, 64))
    seats = max(size, min(options.samples, 64), 1)
    plain = _Answers(target, None, None, limit, seats, options)
    reference = plain.make(size)
    expected: dict[float, list[list[int]]] = {}
    for temperature in (0.0, *(() if options.sample_drafts else options.temperatures)):
        params = [_params(temperature, options.num_tokens, options.seed + i) for i in range(len(prompts))]
        expected[temperature] = reference.generate_ids(prompts, params)
    del reference
    _free(target)
    if options.plain_batches:
        yield _equality(plain, prompts, expected[0.0], 0.0, options)
    del plain
    _free(target)
    short = prompts[0][-options.sample_prompt_tokens :]
    trees = {
        temperature: token_tree(
            target, short, temperature=temperature, depth=FIRST_TOKENS, num_top=options.num_top
        )
        for temperature in options.temperatures
        if options.samples
    }
    for shape in shapes:
        answers = _Answers(target, drafter, shape, limit, seats, options)
        for temperature, outputs in expected.items():
            yield _equality(answers, prompts, outputs, temperature, options)
        distribution = isinstance(shape, TreeBudget) or shape == _distribution_drafts(options)
        for temperature, tree in trees.items() if distribution else ():
            yield _distribution(answers.whole, short, tree, temperature, options)
        del answers  # their caches, before the next takes its share of the memory
        _free(target)


class _Answers:
    """Engines for one shape of drafts (None: plain decoding), made as batch sizes ask for them."""

    def __init__(
        self,
        target: Target,
        drafter: DrafterSpec | None,
        shape: int | TreeBudget | None,
        limit: int,
        seats: int,
        options: CheckOptions,
    ) -> None:
        self.target, self.shape, self.options = target, shape, options
        self._drafter, self._limit, self._seats = drafter, limit, seats
        self._teams: dict[int, SideBySide] = {}

    def make(self, seats: int) -> LLM:
        """An engine for so many requests at once."""
        shape, spec = self.shape, self._drafter
        page_size = CUDA_PAGE_SIZE if self.target.device.type == "cuda" else CPU_PAGE_SIZE
        sizes: dict[str, Any] = {"max_num_seqs": seats, "max_model_len": self._limit}
        if self.options.engines > 1:  # else one engine takes the memory of all
            sizes["num_pages"] = seats * (-(-self._limit // page_size) + 1)
        if shape is None or spec is None:
            return LLM(self.target, **sizes)
        if not isinstance(spec, str | Path):
            return LLM(self.target, spec(shape), **sizes)
        return LLM(
            self.target,
            spec,
            num_draft_tokens=shape if isinstance(shape, int) else None,
            tree=shape if isinstance(shape, TreeBudget) else None,
            sample_drafts=self.options.sample_drafts,
            **sizes,
        )

    @cached_property
    def whole(self) -> LLM:
        """The engine of large batches."""
        return self.make(self._seats)

    def generate_ids(
        self, prompts: list[list[int]], params: list[SamplingParams], size: int
    ) -> list[list[int]]:
        """Output ids, `size` prompts at once."""
        if self.options.engines == 1 or size >= FULL:
            parts = [slice(begin, begin + size) for begin in range(0, len(prompts), size)]
            return [ids for part in parts for ids in self.whole.generate_ids(prompts[part], params[part])]
        if size not in self._teams:
            self._teams[size] = SideBySide(lambda: self.make(size), self.options.engines, self.target.device)
        return self._teams[size].generate_ids(prompts, params, size)

    @property
    def llms(self) -> list[LLM]:
        """All engines so far."""
        teams = [llm for team in self._teams.values() for llm in team.llms]
        return [self.whole, *teams] if "whole" in self.__dict__ else teams

    def acceptance_length(self) -> float:
        """Of all engines together."""
        stats = [llm.stats for llm in self.llms]
        return acceptance_length(
            sum(one.row_steps for one in stats),
            sum(one.drafted_row_steps for one in stats),
            sum(one.accepted for one in stats),
        )


def _free(target: Target) -> None:
    """Give back what an engine held."""
    if target.device.type == "cuda":
        gc.collect()  # engines and their graphs hold each other
        torch.cuda.empty_cache()


def _params(temperature: float, num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed)


def _equality(
    answers: _Answers,
    prompts: list[list[int]],
    expected: list[list[int]],
    temperature: float,
    options: CheckOptions,
) -> Check:
    """Tokens with the drafter against plain decoding's, at every batch size."""
    params = [_params(temperature, options.num_tokens, options.seed + i) for i in range(len(prompts))]
    target, tree = answers.target, isinstance(answers.shape, TreeBudget)
    differences: list[Difference] = []
    for llm in answers.llms:
        llm.stats.reset()
    for size in options.batch_sizes:
        for index, output in enumerate(answers.generate_ids(prompts, params, size)):
            if output == expected[index]:
                continue
            outputs = Outputs(index, size, prompts[index], expected[index], output)
            differences.append(
                greedy_difference(target, outputs, tree=tree)
                if temperature == 0
                else seeded_difference(target, outputs, temperature=temperature, seed=options.seed + index)
            )
    num_outputs = len(prompts) * len(options.batch_sizes)
    near_ties = sum(one.within_rounding for one in differences)
    return Check(
        kind="seeded" if temperature > 0 else "greedy",
        num_draft_tokens=answers.llms[0].num_draft_tokens,
        tree=_tree_name(answers.llms[0]),
        temperature=temperature,
        passed=near_ties == len(differences),
        detail=summary(differences, num_outputs, target.dtype),
        acceptance_length=answers.acceptance_length(),
        tokens=sum(map(len, expected)) * len(options.batch_sizes),
        outputs=num_outputs,
        near_ties=near_ties,
        different=len(differences) - near_ties,
        differences=tuple(differences),
    )


def _tree_name(llm: LLM) -> str | None:
    tree = None if llm.drafter is None else llm.drafter.tree
    return str(tree) if isinstance(tree, TreeBudget) else None


def _distribution(
    llm: LLM,
    prompt: list[int],
    tree: dict[tuple[int, ...], float],
    temperature: float,
    options: CheckOptions,
) -> Check:
    """First tokens over many seeds, against the exact tree."""
    # Far from the seeds of the equality checks.
    seeds = [options.seed + 1_000_003 + i for i in range(options.samples)]
    llm.stats.reset()
    outputs = llm.generate_ids(
        [prompt] * options.samples, [_params(temperature, FIRST_TOKENS, seed) for seed in seeds]
    )
    counts = dict.fromkeys(tree, 0)
    broken = 0
    for output in outputs:
        if len(output) < FIRST_TOKENS:
            broken += 1
            continue
        counts[cell_of(output, tree)] += 1
    result = chi_square([counts[cell] for cell in tree], list(tree.values()))
    passed = result.p_value >= options.alpha and not broken
    detail = (
        f"first {FIRST_TOKENS} tokens over {options.samples} seeds: chi-square {result.statistic:.1f}, "
        f"{result.degrees} degrees, p = {result.p_value:.2g}"
    )
    if broken:
        detail += f"; {broken} outputs ended in an error"
    if llm.stats.accepted == 0:
        detail += " (no draft was accepted here, so the acceptance rule was tried from one side only)"
    if result.degrees == 0:
        detail += " (one likely output only: shows nothing; try another prompt or a higher temperature)"
    return Check(
        kind="distribution",
        num_draft_tokens=llm.num_draft_tokens,
        tree=_tree_name(llm),
        temperature=temperature,
        passed=passed,
        detail=detail,
        acceptance_length=llm.stats.acceptance_length,
        tokens=options.samples,
        statistic=result.statistic,
        degrees=result.degrees,
        p_value=result.p_value,
    )
