"""Counted work against counting by hand, and against the matrices that a model really has."""

import pytest
import torch
from slot_helpers import make_batch, make_head, rows_of
from torch.utils.flop_counter import FlopCounterMode

from eyas.training.flops import Work, count_work, layer_matrices, step_flops
from eyas.training.objectives.eagle3 import Eagle3Objective
from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.rows import shift_features
from eyas.training.timing import Clock, gemm_rate
from tiny import tiny_config, tiny_target


def test_slots_and_keys_are_counted_by_a_loop():
    batch = make_batch([[5, 4], [7]], 10)
    rows = rows_of(batch)
    objective = PEagleObjective(num_depths=3)
    slots = objective.all_slots(rows)
    tokens = token_keys = there = keys = supervised = 0
    for row in range(2):
        for place in range(10):
            if rows.segments[row, place] >= 0:
                tokens += 1
                token_keys += int(rows.positions[row, place]) + 1
        for slot in range(slots.anchors.shape[1]):
            if slots.segments[row, slot] >= 0:
                there += 1
                keys += int(rows.positions[row, slots.anchors[row, slot]]) + 1 + int(slots.depths[slot])
            supervised += int(slots.supervised[row, slot])
    work = count_work(rows, slots)
    assert work.tolist() == [tokens, token_keys, there, keys, supervised]
    assert tokens == 4 + 3 + 6  # the last row of a document has no next token


def test_layer_matrices_are_the_model_s():
    config, decoder = tiny_config(), tiny_target().decoder
    matrices = [p.numel() for p in decoder.layers[0].parameters() if p.ndim == 2]
    assert layer_matrices(config, config.hidden_size) == sum(matrices)
    head = make_head("peagle")
    sizes = [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in head.layers]
    assert sizes == [layer_matrices(head.config, 64), layer_matrices(head.config, 32)]


def test_the_drafter_s_products_are_those_that_torch_counts():
    """One document fills each row, so nothing is padding: forward and backward as FlopCounterMode sees
    them."""
    batch = make_batch([[24], [24]], 24, prompt=1)
    rows, head = rows_of(batch), make_head("eagle3", dtype=torch.float32)
    objective = Eagle3Objective(steps=1)
    slots = objective.all_slots(rows)
    features = torch.randn(2, 24, head.config.feature_size)
    with FlopCounterMode(display=False) as counter:
        objective.forward(head, rows, shift_features(batch, features), slots).sum().backward()
    counted = counter.get_total_flops()
    work = Work(*count_work(rows, slots))._replace(supervised=torch.tensor(0.0))
    target = tiny_config(num_layers=1)
    empty = Work(work.tokens, work.token_keys, *torch.zeros(3))
    ours = step_flops(work, head.config, target) - step_flops(empty, head.config, target)
    ours += 6 * head.config.feature_size * 32 * float(work.tokens)
    teacher = 2 * layer_matrices(target, 32) * float(work.tokens) + 4 * 32 * float(work.token_keys)
    teacher += 2 * 32 * 64 * float(work.tokens)
    online = step_flops(work, head.config, target) - step_flops(work, head.config, target, online=False)
    assert online == pytest.approx(teacher)
    # Dense attention computes the masked half too, and padding; features need no gradient: within a quarter.
    assert ours == pytest.approx(counted, rel=0.25)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", ["tables", "hidden"])
def test_a_correction_costs_what_torch_counts(form, frozen):
    """Its own products and those of the loss, against a head without one; no slot is padding."""
    rank, supervised, slots, tokens = 8, 40, 60, 24
    target, base = tiny_config(num_layers=1), make_head("peagle", dtype=torch.float32)
    head = make_head("peagle", dtype=torch.float32, markov_rank=rank, markov_form=form)
    work = Work(*map(torch.tensor, (tokens, 0, slots, 0, supervised)))
    ours = step_flops(work, head.config, target, frozen=frozen)
    ours -= step_flops(work, base.config, target, frozen=frozen)
    for parameter in head.parameters():
        parameter.requires_grad_(not frozen)
    head.markov.requires_grad_(requires_grad=True)
    normed = torch.randn(slots, 32, requires_grad=not frozen)
    weight = head.lm_head.weight
    with FlopCounterMode(display=False) as counter:
        if form == "hidden":
            embedded = torch.randn(tokens, 32, requires_grad=not frozen)
            token_part = head.markov.token(embedded)[torch.arange(slots) % tokens]
            normed = head.markov.corrected(normed, token_part, torch.ones(slots, dtype=torch.bool))
        else:
            normed, weight = head.markov.joined(normed, weight, torch.arange(slots) % 40)
        (normed[:supervised] @ weight.T).sum().backward()
    counted = counter.get_total_flops()
    # What the base's loss costs: logits, and the gradients of both where both train.
    counted -= (2 if frozen else 6) * 32 * 40 * supervised
    if frozen:
        # A frozen base alone would send no gradient back; the count of one takes its lm_head as trained.
        ours += (6 - 2) * 32 * 40 * supervised
    assert ours == pytest.approx(counted)


def test_a_clock_adds_laps_by_name():
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        clock.start()
        torch.randn(200, 200) @ torch.randn(200, 200)
        clock.lap("a")
        clock.lap("b")
    laps = clock.take()
    assert laps["a"] > laps["b"] >= 0
    assert clock.take() == {}
    assert gemm_rate(torch.device("cpu"), torch.float32, repeats=1) > 1e7
