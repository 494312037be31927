"""Prefill: known tokens through the target and the drafter, several requests' chunks in one forward.

Nothing is sampled. Row t of a chunk [start, end) is a token whose successor is known too, so the drafter's
rows (token at t + 1, features at t) are complete. Two ways write the same K and V:

`prefill`           ragged rows, no padding in the target's forward: eager steps, and the CPU
`prefill_blocks`    blocks of R rows, all shapes fixed: what CUDA graphs hold (engine/prefill_graphs)

Example, chunks of slot 4 [0, 3) and slot 1 [8, 10):
    ragged     rows       0  1  2  3  4        q_start [0, 3, 5]
               chunk      0  0  0  1  1
               position   0  1  2  8  9
    R = 2      blocks (slot, start, count)     (4, 0, 2)  (4, 2, 1)  (1, 8, 2)
               position   0  1 | 2  - | 8  9

Blocks of one chunk may stand in one forward: a layer writes K and V of all rows before any row attends, and
each row sees what its own position lets it see.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core.batch import Committed, ForwardBatch
from eyas.drafters.base import reads_history
from eyas.engine.scheduler import Chunk
from eyas.engine.state import EngineState
from eyas.engine.step import StepModels
from eyas.nn.paged import PagedContext, uniform_batch

MAX_PADDING = 0.25
"""Share of padding that the drafter's rectangles of rows may have."""

Block = tuple[int, int, int]
"""Slot, start, count: known tokens [start, start + count) of the request in a slot."""


def cut(chunks: Sequence[Chunk], rows: int) -> list[Block]:
    """Blocks of at most `rows` tokens, those of a chunk in order: [0, 3) by 2 -> [0, 2), [2, 3)."""
    return [
        (chunk.request.slot, start, min(rows, chunk.end - start))
        for chunk in chunks
        for start in range(chunk.start, chunk.end, rows)
    ]


def prefill_blocks(
    models: StepModels, state: EngineState, blocks: Tensor, rows: int, max_visible: int
) -> None:
    """Write the target's and the drafter's K and V of blocks int64 [3, N]: slots, starts, counts <= rows.

    No value is read back to the host, and shapes depend on N and `rows` alone. `max_visible` bounds start +
    count + 1. A block of the trash row with count 0 is padding.
    """
    slots, starts, counts = blocks.unbind(0)
    columns = starts.unsqueeze(1) + torch.arange(rows + 1, device=state.device)
    known = state.history[slots.unsqueeze(1), columns.clamp_max(state.history.shape[1] - 1)]
    batch = uniform_batch(
        token_ids=known[:, :-1],
        start=starts,
        counts=counts,
        page_table=state.page_table[slots],
        page_size=state.page_size,
        max_position=state.max_len,
        max_visible=max_visible,
    )
    drafter = models.drafter
    features = _target(models, batch)
    if drafter is None:
        return
    drafter.prefill(
        Committed(
            tokens=known[:, 1:],
            features=None if features is None else features.view(*known[:, 1:].shape, -1),
            start=starts,
            counts=counts,
            page_table=batch.page_table,
            history=state.history[slots] if reads_history(drafter) else state.history[:0],
            max_position=state.max_len,
            temperature=state.sampling.temperature[slots],
            seeds=state.sampling.seeds[slots],
            max_visible=max_visible,
        )
    )


def prefill(models: StepModels, state: EngineState, chunks: Sequence[Chunk]) -> None:
    """Write the target's and the drafter's K and V of the chunks."""
    order = sorted(chunks, key=lambda chunk: chunk.end - chunk.start, reverse=True)
    lengths = [chunk.end - chunk.start for chunk in order]
    total = sum(lengths)
    q_start = [0]
    for length in lengths:
        q_start.append(q_start[-1] + length)
    slots, starts, counts, first = state.upload(
        [
            [chunk.request.slot for chunk in order],
            [chunk.start for chunk in order],
            lengths,
            q_start[:-1],
        ]
    )
    chunk_of = torch.arange(len(order), device=state.device).repeat_interleave(counts, output_size=total)
    positions = torch.arange(total, device=state.device) - first[chunk_of] + starts[chunk_of]
    page_table = state.page_table[slots]
    pages = page_table[chunk_of, positions // state.page_size].to(torch.int64)
    batch = ForwardBatch(
        token_ids=state.history[slots[chunk_of], positions],
        positions=positions,
        slots=pages * state.page_size + positions % state.page_size,
        visible=(positions + 1).to(torch.int32),
        q_start=torch.cat((first, first.new_full((1,), total))).to(torch.int32),
        page_table=page_table,
        max_rows=lengths[0],
        max_visible=max(chunk.end for chunk in order),
    )
    drafter = models.drafter
    features = _target(models, batch)
    if drafter is None:
        return
    for begin, end in rectangles(lengths):
        group = slice(begin, end)
        drafter.prefill(
            _committed(
                state, slots[group], starts[group], counts[group], first[group], lengths[begin], features
            )
        )


def _target(models: StepModels, batch: ForwardBatch) -> Tensor | None:
    """The target's forward: the features that the drafter wants, [T, A * D]."""
    capture = models.drafter.aux_layers if models.drafter is not None else ()
    context = PagedContext(models.cache, batch)
    features: Tensor | None = models.decoder(batch.token_ids, batch.positions, context, capture=capture)[1]
    return features


def rectangles(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut lengths, longest first, into ranges whose rectangles hold at most MAX_PADDING of padding.

    Example: [100, 98, 20, 19] -> [(0, 2), (2, 4)].
    """
    groups: list[tuple[int, int]] = []
    begin, filled = 0, 0
    for end, length in enumerate(lengths):
        area = lengths[begin] * (end + 1 - begin)
        if filled + length < (1 - MAX_PADDING) * area:
            groups.append((begin, end))
            begin, filled = end, 0
        filled += length
    groups.append((begin, len(lengths)))
    return groups


def _committed(
    state: EngineState,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    first: Tensor,
    rows: int,
    features: Tensor | None,
) -> Committed:
    """The drafter's view of some chunks: `rows` rows each, of which `counts` are real."""
    index = torch.arange(rows, device=state.device)
    history = state.history[slots]
    columns = (starts.unsqueeze(1) + 1 + index).clamp_max(history.shape[1] - 1)
    rectangle = None
    if features is not None:
        rectangle = features[(first.unsqueeze(1) + index).clamp_max(features.shape[0] - 1)]
    return Committed(
        tokens=history.gather(1, columns),
        features=rectangle,
        start=starts,
        counts=counts,
        page_table=state.page_table[slots],
        history=history,
        max_position=state.max_len,
        temperature=state.sampling.temperature[slots],
        seeds=state.sampling.seeds[slots],
    )
