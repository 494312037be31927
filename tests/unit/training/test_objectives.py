"""Both trainers against literal loops over rollouts, in float64: outputs, loss and every gradient."""

from functools import partial

import pytest
import torch
from slot_helpers import make_batch, make_features, make_head, naive_eagle3, naive_peagle, rollouts

from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.rows import draft_rows, shift_features

LENGTHS = [[7, 4], [9, 3]]


def flat(slots, row_length):
    """Index of each (row, anchor, depth) that is not padding."""
    place = {}
    depths = slots.depths.expand_as(slots.anchors).tolist()
    for row in range(slots.anchors.shape[0]):
        for i, (anchor, depth) in enumerate(zip(slots.anchors[row].tolist(), depths[row], strict=True)):
            if slots.segments[row, i] >= 0:
                place[row, anchor, depth] = (row, i)
    return place


def check(model, objective, slots, batch, features, naive, num_depths):
    rows = draft_rows(batch)
    normed = objective.forward(model, rows, shift_features(batch, features), slots)
    place = flat(slots, batch.ids.shape[1])
    probe = torch.randn(
        model.config.draft_vocab_size, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    mine, theirs, compared = 0.0, 0.0, 0
    for row, first, anchor, depth in rollouts(batch, num_depths):
        if (row, anchor, depth) not in place:
            continue
        expected = naive(model, batch, features, row, first, anchor, depth)
        got = normed[place[row, anchor, depth]]
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        mine = mine + (model.logits(got).log_softmax(-1) * probe).sum()
        theirs = theirs + (model.logits(expected).log_softmax(-1) * probe).sum()
        compared += 1
    assert compared > 20
    parameters = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(
        torch.autograd.grad(mine, parameters, allow_unused=True),
        torch.autograd.grad(theirs, parameters, allow_unused=True),
        strict=True,
    ):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "flags", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True}]
)
def test_training_time_test_equals_the_loop_over_rollouts(flags):
    model = make_head("eagle3", **flags)
    batch = make_batch(LENGTHS, 13)
    objective = Eagle3Objective(steps=4)
    rows = draft_rows(batch)
    check(model, objective, objective.all_slots(rows), batch, make_features(batch, model), naive_eagle3, 4)


@pytest.mark.parametrize("staircase", [False, True])
def test_steps_without_teacher_forcing_equal_the_loop_that_feeds_its_own_guesses(staircase):
    model = make_head("eagle3")
    batch = make_batch(LENGTHS, 13)
    guess_ids = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:40].sort().values
    objective = Eagle3Objective(steps=4, staircase=staircase, guess_ids=guess_ids)
    slots = objective.all_slots(draft_rows(batch))
    naive = partial(naive_eagle3, guess_ids=guess_ids)
    check(model, objective, slots, batch, make_features(batch, model), naive, 4)


@pytest.mark.parametrize("staircase", [False, True])
@pytest.mark.parametrize("encoded_depths", [0, 2, 3])
@pytest.mark.parametrize("dropped", [False, True])
def test_peagle_equals_the_loop_over_rollouts(dropped, encoded_depths, staircase):
    model = make_head("peagle", encoded_depths=encoded_depths)
    batch = make_batch(LENGTHS, 13)
    objective = PEagleObjective(num_depths=4, retention=0.9, staircase=staircase)
    rows = draft_rows(batch)
    counts = rows.supervised.sum(1).tolist()
    slots = (
        objective.slots(rows, seed=1, max_supervised=max(counts)) if dropped else objective.all_slots(rows)
    )
    check(model, objective, slots, batch, make_features(batch, model), naive_peagle, 4)


def test_a_document_does_not_depend_on_its_neighbours_in_the_row():
    model = make_head("eagle3")
    together, alone = make_batch([[6, 7]], 13), make_batch([[6]], 13)
    alone.ids[0, :6] = together.ids[0, :6]
    features = make_features(together, model)
    objective = Eagle3Objective(steps=3)
    outs = []
    for batch in (together, alone):
        rows = draft_rows(batch)
        normed = objective.forward(model, rows, shift_features(batch, features), objective.all_slots(rows))
        outs.append(normed.view(1, 3, 13, -1)[:, 0, :5])
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
