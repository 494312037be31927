"""How a decode step is run: eagerly, or replayed from one CUDA graph that holds all of it.

`StepGraphs` captures lazily (or ahead, `to_warm`) one graph for each batch bucket and `Variant`, all in one
shared memory pool (engine/recorder). A batch smaller than its bucket is padded with the trash row. Warm-up
and capture run on the trash row alone, so they change no request.

With `by_phase` a step is two graphs, so that the clock can tell verification from drafting; the second then
waits for a launch of its own, so this is for measuring.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eyas.engine.progress import capturing
from eyas.engine.recorder import Recorder
from eyas.engine.state import EngineState
from eyas.engine.step import Report, StepModels, Variant, first_half, second_half, whole

SMALLEST_VISIBLE = 1024
"""Bounds on visible are powers of two from here on; fewer bounds, fewer graphs."""
TOP_BUCKETS = (0, 1, 5, 20)
"""Numbers of log-probabilities that graphs are made for, then powers of two."""

Mark = Callable[[str], None]
"""Called with a phase's name (a field of EngineStats) when the phase's work has been launched."""


def bucket_of(batch_size: int) -> int:
    """Smallest power of two that holds the batch: 5 -> 8."""
    return 1 << (batch_size - 1).bit_length()


def visible_bound(max_visible: int) -> int:
    """Smallest power of two, SMALLEST_VISIBLE at least, that bounds max_visible: 1500 -> 2048."""
    return max(SMALLEST_VISIBLE, 1 << (max_visible - 1).bit_length())


def top_bucket(num_top: int, vocab_size: int) -> int:
    """How many log-probabilities a graph gives where num_top are asked for: 3 -> 5; -1 (none) stays."""
    if num_top < 0:
        return -1
    enough = [count for count in TOP_BUCKETS if count >= num_top]
    return min(enough[0] if enough else bucket_of(num_top), vocab_size)


def run_eagerly(
    models: StepModels,
    state: EngineState,
    slots: Tensor,
    variant: Variant,
    mark: Mark,
    allowed: Tensor | None = None,
) -> Report:
    """One step without graphs; `allowed` as in engine/step.accept."""
    first = first_half(models, state, slots, variant, allowed)
    mark("verify_seconds")
    report = second_half(models, state, first, variant)
    mark("draft_seconds")
    return report


@dataclass(slots=True)
class Captured:
    """The graphs of a step over static tensors. `batch` is what the slots tensor holds now."""

    slots: Tensor
    report: Report
    graphs: Sequence[tuple[torch.cuda.CUDAGraph, str]]
    """Each with the phase that it ends."""
    batch: tuple[int, ...] = ()


class StepGraphs:
    """Captures and replays; CUDA only."""

    def __init__(
        self, models: StepModels, state: EngineState, recorder: Recorder, *, by_phase: bool = False
    ) -> None:
        self.models, self.state, self.by_phase = models, state, by_phase
        self._recorder = recorder
        self._captured: dict[tuple[int, Variant], Captured] = {}

    def run(self, batch: tuple[int, ...], variant: Variant, mark: Mark) -> Report:
        """Launch a step for a batch of slots; the report's first rows are the batch's.

        The report's tensors belong to the graph: read them before the same graph runs again.
        """
        captured = self._get(bucket_of(len(batch)), self._rounded(variant))
        if captured.batch != batch:
            trash = self.state.num_slots
            padded = [*batch, *[trash] * (captured.slots.shape[0] - len(batch))]
            captured.slots.copy_(self.state.pinned(padded), non_blocking=True)
            captured.batch = batch
        for graph, phase in captured.graphs:
            graph.replay()
            mark(phase)
        return captured.report

    def to_warm(self, wanted: Iterable[tuple[int, Variant]]) -> list[Callable[[], object]]:
        """Calls that capture the graphs of (batch size, variant), each of which does nothing the second time.

        Largest batches first, which the pool likes best.
        """
        keys = {(bucket_of(size), self._rounded(variant)) for size, variant in wanted}
        return [partial(self._get, *key) for key in sorted(keys, reverse=True)]

    def _rounded(self, variant: Variant) -> Variant:
        num_top = top_bucket(variant.num_top, self.state.vocab_size)
        return variant._replace(max_visible=visible_bound(variant.max_visible), num_top=num_top)

    def _get(self, bucket: int, variant: Variant) -> Captured:
        captured = self._captured.get((bucket, variant))
        if captured is None:
            with capturing():
                captured = self._captured[bucket, variant] = self._capture(bucket, variant)
        return captured

    def _capture(self, bucket: int, variant: Variant) -> Captured:
        models, state = self.models, self.state
        trash = torch.full((bucket,), state.num_slots, dtype=torch.int64, device=state.device)
        self._recorder.rehearse(lambda: whole(models, state, trash, variant))
        if self.by_phase and models.drafter is not None:
            first, verify_graph = self._recorder.record(lambda: first_half(models, state, trash, variant))
            report, draft_graph = self._recorder.record(lambda: second_half(models, state, first, variant))
            return Captured(trash, report, [(verify_graph, "verify_seconds"), (draft_graph, "draft_seconds")])
        # Without a drafter the second half launches nothing.
        report, graph = self._recorder.record(lambda: whole(models, state, trash, variant))
        return Captured(trash, report, [(graph, "verify_seconds" if self.by_phase else "step_seconds")])
