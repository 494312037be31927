"""Validation: every anchor at every depth of held-out rows, and those that greedy decoding would visit."""

import torch

from eyas.core.vocab_map import VocabMap
from eyas.data.loader import Batch, slice_rows
from eyas.training.capture import Captured
from eyas.training.metrics import AcceptanceCount, draft_argmax, on_grid
from eyas.training.parallel import World
from eyas.training.rows import draft_rows, teacher_rows
from eyas.training.slots import guess_index
from eyas.training.step import Prepared, TrainStep


@torch.no_grad()
def measure(
    step: TrainStep, vocab_map: VocabMap, rows: Batch, *, batch_rows: int, world: World | None = None
) -> AcceptanceCount:
    """Acceptance by depth over packed held-out rows, `batch_rows` at a time, shared out among ranks."""
    world = world or World()
    count = AcceptanceCount(step.objective.num_depths)
    for begin in range(world.rank * batch_rows, rows.ids.shape[0], world.size * batch_rows):
        _measure_batch(step, vocab_map, slice_rows(rows, begin, begin + batch_rows), count)
    counts = (count.reached, count.right, count.visited_reached, count.visited_right)
    sums = world.sum(torch.tensor(counts, device=rows.ids.device))
    count.reached, count.right, count.visited_reached, count.visited_right = sums.tolist()
    return count


def _measure_batch(step: TrainStep, vocab_map: VocabMap, batch: Batch, count: AcceptanceCount) -> None:
    target, model, objective = step.target, step.model, step.objective
    rows = draft_rows(batch)
    slots = objective.all_slots(rows)
    captured: Captured = step.capture_held_out(target.decoder, batch, model.config.aux_layers)
    normed = step.draft(Prepared(batch, rows, slots, slots.anchors.numel()), captured)
    normed, head_weight = step.output(normed, rows, slots)
    choices = teacher_rows(captured.choices)
    n, depths = rows.tokens.shape[1], slots.depths.expand_as(slots.anchors)
    place = guess_index(slots, n)
    drafts = vocab_map.to_target(draft_argmax(normed, head_weight))
    on_path = (choices == rows.answers).gather(1, place)
    grids = [
        on_grid(values, slots.anchors, depths, n, objective.num_depths)
        for values in (drafts == choices.gather(1, place), slots.supervised, on_path)
    ]
    count.add(*grids)
