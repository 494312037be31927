"""The engine's own loop on random prompts: what a step takes with the host, its graphs and its scheduler.

Every run submits fresh prompts, waits until all of them decode, and times a number of steps between two
waits for the device. Prompts are as much shorter than the context as the requests grow in half a run.

Where the device's time goes meanwhile is told by the events around each launched step (engine/stats):

    device   | step 1 |gap| step 2 |gap| step 3 |
    idle     the gaps (the report's copy to the host runs in them); of a step that the host launched after
             the device had run out of work also what it took longer than the others do, because its first
             event passed before its graph was there
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

import torch

from eyas.core.errors import ConfigError
from eyas.core.sampling import SamplingParams
from eyas.drafters.base import Drafter
from eyas.engine.intake import Group
from eyas.engine.kv_cache import CPU_PAGE_SIZE, CUDA_PAGE_SIZE
from eyas.engine.llm import LLM
from eyas.engine.stats import Lap
from eyas.targets.base import Target
from eyas.verify.forced_lossy import acceptance_table

WARMUP_STEPS = 4
"""After the last prompt was prefilled; graphs are captured before them."""


@dataclass(frozen=True, slots=True)
class LoopSample:
    """One timed run."""

    step_ms: float
    tokens_per_step: float
    """Mean tokens that a request committed a step."""
    replay_ms: float
    """Median of what a step took on the device."""
    gap_ms: float
    """Mean of what the device waited for between two steps."""
    num_late: int
    """Steps that the host launched too late, of those after the first."""

    @property
    def idle_share(self) -> float:
        """Share of a steady loop in which the device had no step."""
        return self.gap_ms / (self.gap_ms + self.replay_ms)


def waits(laps: Sequence[Lap]) -> tuple[float, float, int]:
    """(median of a step, mean wait between two, late ones) in ms, from a loop's steps in order.

    The first step counts as a step only: the loop begins with nothing on the device.

    Example, (begin, end): (0, 10), (11, 21), (22, 36 late): a step takes 10, the gaps are 1 and 1, and the
    late step took 4 longer than 10: waits of 1 and 5, mean 3.
    """
    steps = [lap.end - lap.begin for lap in laps]
    on_time = [ms for ms, lap in zip(steps[1:], laps[1:], strict=True) if not lap.late]
    usual = median(on_time or steps)
    gaps = [
        after.begin - before.end + (max(0.0, after.end - after.begin - usual) if after.late else 0.0)
        for before, after in pairwise(laps)
    ]
    return usual, mean(gaps) if gaps else 0.0, sum(lap.late for lap in laps[1:])


class StepLoop:
    """An engine of its own (caches, graphs) for one batch size."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        batch: int,
        context: int,
        num_steps: int,
        acceptance: float | None,
        seed: int = 0,
    ) -> None:
        depth = 0 if drafter is None else drafter.tree.depth
        expected = 1.0 if drafter is None else acceptance or 1.0
        self._batch, self._num_steps = batch, num_steps
        self._prompt_length = max(2, context - round(num_steps * expected / 2))
        # While a long batch is prefilled, its first requests decode already.
        self._max_tokens = (num_steps + WARMUP_STEPS + 2 * batch + 16) * (depth + 1)
        self._vocab_size = target.config.vocab_size
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._device = target.device
        limit = target.config.max_position_embeddings
        self._max_tokens = min(self._max_tokens, limit - self._prompt_length - depth - 2)
        if self._max_tokens < num_steps * (depth + 1):
            raise ConfigError(
                f"context={context}: {num_steps} steps go past the target's {limit} positions; "
                "lower the context or the number of steps"
            )
        max_len = self._prompt_length + self._max_tokens + depth + 1
        page_size = CUDA_PAGE_SIZE if self._device.type == "cuda" else CPU_PAGE_SIZE
        self.llm = LLM(
            target,
            drafter,
            max_model_len=max_len,
            max_num_seqs=batch,
            page_size=page_size,
            # One more each: the scheduler admits a request only if all that run could grow by a page.
            num_pages=batch * (-(-max_len // page_size) + 1),
        )
        if acceptance is not None and depth:
            state = self.llm._runner.state  # noqa: SLF001 - a timing run sets what no user may set
            state.forced_lengths = acceptance_table(acceptance, depth, device=self._device)

    def run(self) -> LoopSample:
        """Prefill fresh prompts and time the steps."""
        prompts = [
            [self._random.randrange(self._vocab_size) for _ in range(self._prompt_length)]
            for _ in range(self._batch)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True)
        groups = self.llm.new_intake().groups(prompts, params)
        try:
            for group in groups:
                self.llm.submit(group)
            while not all(group.requests[0].output_ids for group in groups):
                self._step(groups)
            for _ in range(WARMUP_STEPS):
                self._step(groups)
            return self._timed(groups)
        finally:
            for group in groups:
                self.llm.abort(group.request_id)

    def _timed(self, groups: list[Group]) -> LoopSample:
        clock = self.llm._runner._clock  # noqa: SLF001 - as above
        self._wait()
        self.llm.stats.reset()
        clock.keep()
        begin = time.perf_counter()
        for _ in range(self._num_steps):
            self.llm.step()
        self._wait()
        seconds = time.perf_counter() - begin
        self._check(groups)
        steps = _steps(clock.laps())
        return LoopSample(1e3 * seconds / self._num_steps, self.llm.stats.tokens_per_forward, *waits(steps))

    def _step(self, groups: list[Group]) -> None:
        self.llm.step()
        self._check(groups)

    def _check(self, groups: list[Group]) -> None:
        for group in groups:
            request = group.requests[0]
            if request.finish_reason is not None:
                raise ConfigError(
                    f"a request ended early ({request.error or request.finish_reason}): "
                    "lower the number of steps or the batch"
                )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _steps(laps: Sequence[Lap]) -> list[Lap]:
    """One lap a step: eager ones are two, verification and drafting."""
    if all(lap.name == "step_seconds" for lap in laps):
        return list(laps)
    pairs = zip(laps[::2], laps[1::2], strict=True)
    return [Lap("step_seconds", first.begin, second.end, first.late) for first, second in pairs]
