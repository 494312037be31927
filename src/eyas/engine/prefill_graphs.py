"""Prefill replayed from CUDA graphs: one for each number of blocks (a power of two) and bound on visible.

Run eagerly, a short prompt costs some ten launches a layer, tens of milliseconds of a host and next to
nothing of a GPU. A graph is one launch. What it prefills it reads from one static tensor of (slot, start,
count), which an upload fills; padding blocks belong to the trash row and have count 0. Warm-up and capture
run on padding alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eyas.engine.graphs import SMALLEST_VISIBLE, bucket_of
from eyas.engine.prefill import Block, cut, prefill_blocks
from eyas.engine.progress import capturing
from eyas.engine.recorder import Recorder
from eyas.engine.scheduler import Chunk
from eyas.engine.state import EngineState
from eyas.engine.step import StepModels

BLOCK_ROWS = 64
"""Rows of a block. More than plans.MOST_ROTATED of kernels/triton/paged_attention: up to there attention
caches a request's own rows itself, and another block of the same request would read them unwritten."""
MOST_BLOCKS = 64
"""Of one graph. With more, multiplying is the cost and not launching."""


def blocks_bound(max_visible: int) -> int:
    """Smallest of SMALLEST_VISIBLE times 1, 4, 16, ... that bounds max_visible: 1500 -> 4096."""
    bound = SMALLEST_VISIBLE
    while bound < max_visible:
        bound *= 4
    return bound


def pieces(num_blocks: int, most: int) -> list[int]:
    """Buckets that hold the blocks, one after another; `most`, a power of two, is the largest.

    The last one is padded, by a quarter at most where that is more than a few blocks.

    Example, most 32: 70 -> [32, 32, 8]; 33 -> [32, 1]; 13 -> [16]; 10 -> [8, 2]; 5 -> [8].
    """
    sizes = []
    while num_blocks > 0:
        bucket = min(bucket_of(num_blocks), most)
        if bucket > 8 and bucket - num_blocks > bucket // 4:
            bucket //= 2
        sizes.append(bucket)
        num_blocks -= bucket
    return sizes


@dataclass(slots=True)
class CapturedBlocks:
    """A graph and what it reads: int64 [3, N], slots, starts and counts."""

    blocks: Tensor
    graph: torch.cuda.CUDAGraph


class PrefillGraphs:
    """Captures and replays; CUDA only.

    Args:
        models: target, cache, drafter.
        state: their rows.
        recorder: makes the graphs.
        most_blocks: of one graph, at most; rounded up to a power of two, and MOST_BLOCKS are the most.
        rows: of a block.
    """

    def __init__(
        self,
        models: StepModels,
        state: EngineState,
        recorder: Recorder,
        *,
        most_blocks: int = MOST_BLOCKS,
        rows: int = BLOCK_ROWS,
    ) -> None:
        self.models, self.state, self.rows = models, state, rows
        self._recorder = recorder
        self.most_blocks = min(bucket_of(most_blocks), MOST_BLOCKS)
        self._captured: dict[tuple[int, int], CapturedBlocks] = {}

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Launch the prefill of all chunks."""
        blocks = cut(chunks, self.rows)
        # A small model's row behind a chunk sees one key more.
        bound = blocks_bound(min(max(chunk.end for chunk in chunks) + 1, self.state.max_len))
        begin = 0
        for size in pieces(len(blocks), self.most_blocks):
            captured = self._get(size, bound)
            host = self.state.pinned(self._padded(blocks[begin : begin + size], size))
            captured.blocks.copy_(host, non_blocking=True)
            captured.graph.replay()
            begin += size

    def to_warm(self, context: int | None = None) -> list[Callable[[], object]]:
        """Calls that capture all graphs for so many tokens of context, by default all that there can be.

        Largest first; each does nothing the second time.
        """
        longest = blocks_bound(self.state.max_len if context is None else min(context, self.state.max_len))
        bounds = [
            bound for bound in (SMALLEST_VISIBLE << 2 * power for power in range(32)) if bound <= longest
        ]
        sizes = [1 << power for power in range(self.most_blocks.bit_length())]
        keys = [(size, bound) for size in sizes for bound in bounds]
        return [partial(self._get, *key) for key in sorted(keys, reverse=True)]

    def _padded(self, blocks: Sequence[Block], size: int) -> list[list[int]]:
        """Slots, starts and counts of so many blocks."""
        padding = size - len(blocks)
        slots, starts, counts = zip(*blocks, strict=True) if blocks else ((), (), ())
        trash = self.state.num_slots
        return [[*slots, *[trash] * padding], [*starts, *[0] * padding], [*counts, *[0] * padding]]

    def _get(self, size: int, bound: int) -> CapturedBlocks:
        captured = self._captured.get((size, bound))
        if captured is None:
            with capturing():
                captured = self._captured[size, bound] = self._capture(size, bound)
        return captured

    def _capture(self, size: int, bound: int) -> CapturedBlocks:
        blocks = self.state.upload(self._padded([], size))
        job = partial(prefill_blocks, self.models, self.state, blocks, self.rows, bound)
        self._recorder.rehearse(job)
        return CapturedBlocks(blocks, self._recorder.record(job)[1])
