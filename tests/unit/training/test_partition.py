"""Sequence partitioning: gradients of parts equal the flat run's, for every way to cut."""

import pytest
import torch
from slot_helpers import make_batch, make_features, make_head

from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.peagle.partition import (
    Partition,
    prefix_parts,
    rollout_parts,
    rollout_starts,
    train_parts,
)
from eyas.training.rows import draft_rows, shift_features
from eyas.training.slots import guess_index

N = 8
LENGTHS = [[5, 3], [8]]
"""With S = 8 a boundary stands at every row: documents and anchors are at boundaries; inside for S = 2."""


def world(*, full, seed=1, depths=4, lengths=LENGTHS, n=N):
    batch = make_batch(lengths, n)
    rows = draft_rows(batch)
    objective = PEagleObjective(num_depths=depths, retention=0.8, staircase=True)
    slots = objective.all_slots(rows) if full else objective.slots(rows, seed=seed, max_supervised=n)
    return batch, rows, objective, slots


def probe(model, normed, slots, rows):
    """A loss whose every supervised slot matters, by (row, guess, depth) and not by place."""
    vd = model.config.draft_vocab_size
    generator = torch.Generator().manual_seed(5)
    n = rows.tokens.shape[1]
    table = torch.randn(slots.anchors.shape[0], n, 8, vd, generator=generator, dtype=torch.float64)
    depths = slots.depths.expand_as(slots.anchors)
    row = torch.arange(slots.anchors.shape[0])[:, None].expand_as(depths)
    weights = table[row, guess_index(slots, n), depths]
    values = (model.logits(normed).log_softmax(-1) * weights).sum(-1)
    return (values * slots.supervised).sum()


def parameters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def grads(model):
    taken = {name: p.grad for name, p in parameters(model).items()}
    for p in parameters(model).values():
        p.grad = None
    return taken


def run_parts(model, objective, rows, features, slots, partition):
    config, seen = model.config, []

    def forward(*inputs):
        return objective.forward_part(model, *inputs)

    def lose(normed, part, bound):
        assert int(part.supervised.sum()) <= bound
        loss = probe(model, normed, part, rows)
        seen.append((float(loss.detach()), part))
        return loss

    def empty_past():
        shape = (*rows.tokens.shape, config.num_kv_heads, config.head_dim)
        # Not zeros, for nobody may read what was not yet written.
        return [
            tuple(torch.full(shape, 7.0, dtype=torch.float64) for _ in "kv") for _ in range(config.num_layers)
        ]

    train_parts(
        partition,
        rows,
        features,
        slots,
        num_depths=objective.num_depths,
        bound=10_000,
        forward=forward,
        lose=lose,
        empty_past=empty_past,
    )
    return seen


def compare(model, objective, batch, rows, slots, partition, expected, loss):
    features = shift_features(batch, make_features(batch, model))
    seen = run_parts(model, objective, rows, features, slots, partition)
    assert abs(sum(value for value, _ in seen) - loss) < 1e-9
    owned = sum(int(part.supervised.sum()) for _, part in seen)
    assert owned == int(slots.supervised.sum())
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def flat(model, objective, batch, rows, slots):
    features = shift_features(batch, make_features(batch, model))
    loss = probe(model, objective.forward(model, rows, features, slots), slots, rows)
    loss.backward()
    return float(loss.detach()), grads(model)


@pytest.mark.parametrize("mode", ["shared", "replayed", "prefix"])
@pytest.mark.parametrize("full", [False, True], ids=["drop", "no drop"])
@pytest.mark.parametrize("encoded_depths", [0, 3])
def test_gradients_equal_the_flat_run_for_every_number_of_parts(mode, full, encoded_depths):
    model = make_head("peagle", encoded_depths=encoded_depths)
    batch, rows, objective, slots = world(full=full)
    assert int(slots.supervised.sum()) > 10
    loss, expected = flat(model, objective, batch, rows, slots)
    assert all(gradient is not None for gradient in expected.values())
    for num_parts in range(1, N + 1):
        compare(model, objective, batch, rows, slots, Partition(num_parts, mode), expected, loss)


@pytest.mark.parametrize("mode", ["shared", "replayed", "prefix"])
@pytest.mark.parametrize("case", [([[8, 8]], 16, 6), ([[4, 4, 4, 4]], 16, 6), ([[16], [3]], 16, 8)], ids=str)
def test_documents_at_boundaries(mode, case):
    lengths, n, depths = case
    model = make_head("peagle")
    batch, rows, objective, slots = world(full=False, depths=depths, lengths=lengths, n=n)
    loss, expected = flat(model, objective, batch, rows, slots)
    for num_parts in (2, 4):
        compare(model, objective, batch, rows, slots, Partition(num_parts, mode), expected, loss)


@pytest.mark.parametrize("mode", ["shared", "replayed", "prefix"])
def test_a_single_depth_has_no_rollouts(mode):
    model = make_head("peagle")
    batch, rows, objective, slots = world(full=False, depths=1)
    features = shift_features(batch, make_features(batch, model))
    loss = probe(model, objective.forward(model, rows, features, slots), slots, rows)
    loss.backward()
    expected = grads(model)
    run_parts(model, objective, rows, features, slots, Partition(3, mode))
    for name, gradient in grads(model).items():
        if expected[name] is not None and gradient is not None:
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10)


def bucket(position, bounds):
    return max(s for s in range(len(bounds) - 1) if bounds[s] <= position)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, N])
def test_prefix_parts_are_the_papers(num_parts):
    """In words: depth 1 belongs where its own position stands, deeper slots where their parent does."""
    _, _, _, slots = world(full=False)
    bounds = [s * N // num_parts for s in range(num_parts + 1)]
    found = {}
    for number, part in enumerate(prefix_parts(slots, N, num_parts)):
        for row in range(2):
            for anchor, depth, segment in zip(
                part.slots.anchors[row].tolist(),
                part.slots.depths[row].tolist(),
                part.slots.segments[row].tolist(),
                strict=True,
            ):
                if segment >= 0 and depth > 0:
                    found[row, anchor, depth] = number
    assert found
    for (row, anchor, depth), number in found.items():
        parent = number if depth == 1 else found[row, anchor, depth - 1]
        assert number == (bucket(anchor + 1, bounds) if depth == 1 else parent)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 40])
def test_every_rollout_is_whole_in_one_part(num_parts):
    _, _, _, slots = world(full=False, depths=5, lengths=[[40], [10, 25]], n=40)
    wanted = int((slots.segments[:, 40:] >= 0).sum())
    _, size = rollout_starts(slots, num_parts, 5)
    found, largest = {}, 0
    for number, part in enumerate(rollout_parts(slots, 40, num_parts, 5)):
        real = part.slots.segments >= 0
        largest = max(largest, int(real.sum(1).max()))
        for row, place in real.nonzero().tolist():
            anchor, depth = int(part.slots.anchors[row, place]), int(part.slots.depths[row, place])
            assert found.setdefault((row, anchor), number) == number
            assert (row, anchor, depth) not in found
            found[row, anchor, depth] = number
    assert sum(len(key) == 3 for key in found) == wanted
    assert largest <= size
    assert size <= -(-(slots.anchors.shape[1] - 40) // num_parts) + 3


def test_docstring_example_of_the_cut():
    _, _, _, slots = world(full=False)
    own = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5]], dtype=torch.int32)
    starts, size = rollout_starts(slots._replace(stairs=slots.stairs._replace(own=own)), 2, 4)
    assert starts.tolist() == [[0, 5, 8]]
    assert size == 6
