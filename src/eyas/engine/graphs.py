"""How a decode step is run: eagerly, or replayed from CUDA graphs.

A step has two halves, so that their times can be told apart and the host can read the tokens while the
device drafts:

    first    verify and accept; its report goes to the host
    second   expand, draft and commit

`StepGraphs` captures both lazily per (batch bucket, bound on visible, sampler needs), in one shared memory
pool. A batch smaller than its bucket is padded with the trash row. Warm-up runs on the trash row alone, so
it changes no request. Penalties, logit bias and log-probabilities run eagerly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.engine.sampler import Needs
from eyas.engine.state import EngineState
from eyas.engine.step import StepModels, Verified, accept, commit, expand, verify
from eyas.verify.accepted import Accepted
from eyas.verify.tree import AcceptedPath

SMALLEST_VISIBLE = 1024
"""Bounds on visible are powers of two from here on; fewer bounds, fewer graphs."""


class FirstHalf(NamedTuple):
    """What the second half and the host need of the first."""

    slots: Tensor
    verified: Verified
    accepted: Accepted | AcceptedPath
    report: Tensor


def first_half(
    models: StepModels, state: EngineState, slots: Tensor, needs: Needs, max_visible: int
) -> FirstHalf:
    """Verify and accept."""
    verified = verify(models, state, slots, max_visible)
    accepted, report = accept(state, slots, verified, needs)
    return FirstHalf(slots, verified, accepted, report)


def second_half(models: StepModels, state: EngineState, first: FirstHalf) -> None:
    """Expand, draft and commit."""
    committed = expand(models, state, first.slots, first.verified, first.accepted)
    draft = None if models.drafter is None else models.drafter.propose(committed)
    commit(state, first.slots, first.verified, first.accepted, draft)


def bucket_of(batch_size: int) -> int:
    """Smallest power of two that holds the batch: 5 -> 8."""
    return 1 << (batch_size - 1).bit_length()


def visible_bound(max_visible: int) -> int:
    """Smallest power of two, SMALLEST_VISIBLE at least, that bounds max_visible: 1500 -> 2048."""
    return max(SMALLEST_VISIBLE, 1 << (max_visible - 1).bit_length())


@dataclass(slots=True)
class Captured:
    """Two graphs over the same static tensors. `batch` is what the slots tensor holds now."""

    slots: Tensor
    first: FirstHalf
    verify_graph: torch.cuda.CUDAGraph
    draft_graph: torch.cuda.CUDAGraph
    batch: tuple[int, ...] = ()


class StepGraphs:
    """Captures and replays; CUDA only."""

    def __init__(self, models: StepModels, state: EngineState) -> None:
        self.models, self.state = models, state
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, int, int], Captured] = {}

    @staticmethod
    def can_run(needs: Needs) -> bool:
        """Whether a batch with these needs is worth a graph."""
        return not needs & Needs.SHAPE

    def prepare(self, batch: tuple[int, ...], needs: Needs, max_visible: int) -> Captured:
        """The graphs for a batch of slots, captured at first use, with the batch in their slots tensor."""
        key = (bucket_of(len(batch)), visible_bound(max_visible), int(needs))
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        if captured.batch != batch:
            padded = [*batch, *[self.state.num_slots] * (key[0] - len(batch))]
            captured.slots.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)
            captured.batch = batch
        return captured

    def _capture(self, bucket: int, max_visible: int, needs: int) -> Captured:
        models, state = self.models, self.state
        trash = torch.full((bucket,), state.num_slots, dtype=torch.int64, device=state.device)
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            # Twice: the first run compiles kernels and may allocate the rows of q.
            for _ in range(2):
                second_half(models, state, first_half(models, state, trash, Needs(needs), max_visible))
        current.wait_stream(side)
        torch.cuda.synchronize()
        verify_graph, draft_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads (a server) may talk to the device meanwhile: hence thread_local.
        with torch.cuda.graph(verify_graph, pool=self._pool, capture_error_mode="thread_local"):
            first = first_half(models, state, trash, Needs(needs), max_visible)
            # Nothing after acceptance reads the logits: give their memory to the second graph.
            empty = first.verified.logits.new_empty(0)
            first = first._replace(verified=first.verified._replace(logits=empty))
        with torch.cuda.graph(draft_graph, pool=self._pool, capture_error_mode="thread_local"):
            second_half(models, state, first)
        return Captured(trash, first, verify_graph, draft_graph)
