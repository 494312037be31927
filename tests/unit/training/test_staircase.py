"""The layout by anchor and its attention, against the slot rule and the contexts that use masks."""

import pytest
import torch
from slot_helpers import make_batch, make_features, make_head, naive_eagle3, naive_peagle
from test_objectives import check
from test_slot_rule import compare, heads

from eyas.nn.staircase import StaircaseContext, StaircaseTTTContext
from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.peagle.cod import cap_anchors, chain_lengths
from eyas.training.peagle.layout import rollout_slots
from eyas.training.rows import draft_rows

LENGTHS = [[7, 4], [9, 3]]


def pairs(slots, row):
    depths = slots.depths.expand_as(slots.anchors)[row].tolist()
    triples = zip(slots.anchors[row].tolist(), depths, slots.segments[row].tolist(), strict=True)
    return [(anchor, depth) for anchor, depth, segment in triples if segment >= 0]


def test_layout_is_rollouts_sorted_by_anchor():
    rows = draft_rows(make_batch([[20, 18], [38], [4, 4, 4]], 40, prompt=3))
    uniforms = torch.rand(4, 3, 40, generator=torch.Generator().manual_seed(5))
    lengths = chain_lengths(rows.supervised, rows.segments, uniforms, retention=0.8)
    slots = rollout_slots(rows, lengths, int(lengths.sum(1).max()) + 2)
    for row in range(3):
        wanted = [(a, k) for a in range(40) for k in range(1, int(lengths[row, a]) + 1)]
        found = pairs(slots, row)
        assert [pair for pair in found if pair[1] == 0] == [
            (a, 0) for a in range(40) if rows.segments[row, a] >= 0
        ]
        assert [pair for pair in found if pair[1] > 0] == wanted
        assert wanted


def test_the_docstring_example_of_the_layout():
    rows = draft_rows(make_batch([[8]], 8))
    slots = rollout_slots(rows, torch.tensor([[1, 2, 0, 0, 1, 0, 0, 0]]), 5)
    assert pairs(slots, 0)[-4:] == [(0, 1), (1, 1), (1, 2), (4, 1)]
    assert slots.segments[0, -1] == -1


@pytest.mark.parametrize("full", [False, True])
def test_staircase_context_equals_the_slot_rule(full):
    rows = draft_rows(make_batch([[10, 9], [14, 3]], 20))
    objective = PEagleObjective(num_depths=5, staircase=True)
    slots = objective.all_slots(rows) if full else objective.slots(rows, seed=4, max_supervised=16)
    q, k, v = tensors = heads(slots)
    context = StaircaseContext(slots.stairs, 20)
    compare(slots, tensors, context.attend(0, q, k, v, scale=0.3, window=None))


def test_both_layouts_hold_the_same_slots():
    rows = draft_rows(make_batch([[10, 9], [14, 3]], 20))
    by_depth, by_anchor = (
        PEagleObjective(num_depths=5, staircase=flag).slots(rows, seed=4, max_supervised=16)
        for flag in (False, True)
    )
    for row in range(2):
        assert sorted(pairs(by_depth, row)) == sorted(pairs(by_anchor, row))


def test_ttt_context_equals_the_slot_rule():
    rows = draft_rows(make_batch([[10, 9], [14, 3]], 20))
    slots = Eagle3Objective(steps=4, staircase=True).all_slots(rows)
    tensors = heads(slots)
    steps = [[t.split(20, dim=1)[s] for t in tensors] for s in range(4)]
    context = StaircaseTTTContext(slots.stairs)
    out = torch.cat([context.attend(0, *step, scale=0.3, window=None) for step in steps], dim=1)
    compare(slots, tensors, out)


def test_eagle3_equals_the_loop_over_rollouts():
    model, batch = make_head("eagle3"), make_batch(LENGTHS, 13)
    objective = Eagle3Objective(steps=4, staircase=True)
    slots = objective.all_slots(draft_rows(batch))
    check(model, objective, slots, batch, make_features(batch, model), naive_eagle3, 4)


@pytest.mark.parametrize("dropped", [False, True])
def test_peagle_equals_the_loop_over_rollouts(dropped):
    model, batch = make_head("peagle"), make_batch(LENGTHS, 13)
    objective = PEagleObjective(num_depths=4, retention=0.9, staircase=True)
    rows = draft_rows(batch)
    bound = int(rows.supervised.sum(1).max())
    slots = objective.slots(rows, seed=1, max_supervised=bound) if dropped else objective.all_slots(rows)
    check(model, objective, slots, batch, make_features(batch, model), naive_peagle, 4)


def test_an_anchor_cap_keeps_whole_rollouts():
    lengths = torch.tensor([[2, 0, 1, 3], [1, 1, 1, 1]])
    uniforms = torch.tensor([[0.5, 0.1, 0.9, 0.2], [0.4, 0.3, 0.2, 0.1]])
    assert cap_anchors(lengths, uniforms, 2).tolist() == [[2, 0, 0, 3], [0, 0, 1, 1]]
    rows = draft_rows(make_batch([[20, 18]], 40, prompt=3))
    objective = PEagleObjective(num_depths=5, max_anchors=6, staircase=True)
    slots = objective.slots(rows, seed=0, max_supervised=40)
    anchors = {anchor for anchor, depth in pairs(slots, 0) if depth > 0}
    assert len(anchors) == 6
    free = PEagleObjective(num_depths=5, staircase=True).slots(rows, seed=0, max_supervised=40)
    kept = [pair for pair in pairs(free, 0) if pair[1] == 0 or pair[0] in anchors]
    assert kept == pairs(slots, 0)
