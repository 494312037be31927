import math

import pytest
import torch
from slot_helpers import make_batch

from eyas.training.objectives.peagle import PEagleObjective
from eyas.training.peagle.cod import capacities, chain_lengths, full_lengths
from eyas.training.peagle.layout import chain_slots
from eyas.training.rows import draft_rows


def naive_cod(supervised, segments, uniforms, retention, minimum):
    """The definition with sets: P_k of rows kept at depth k, for one row of the batch."""
    rows = {p for p, flag in enumerate(supervised) if flag}
    candidates = {p for p in rows if p > 0 and segments[p - 1] == segments[p]}
    kept = []
    for depth in range(1, len(uniforms) + 1):
        size = max(math.floor((len(rows) - depth) * max(retention**depth, minimum)), 0)
        order = sorted(candidates, key=lambda p: float(uniforms[depth - 1][p]))
        chosen = set(order[:size])
        kept.append(chosen)
        candidates = {p + 1 for p in chosen} & rows
    return kept


@pytest.mark.parametrize(("retention", "minimum"), [(0.8, 0.0), (0.5, 0.3), (1.0, 0.0)])
def test_chain_lengths_follow_the_definition(retention, minimum):
    batch = make_batch([[20, 18], [38], [5, 6, 7, 8, 9]], 40, prompt=3)
    rows = draft_rows(batch)
    uniforms = torch.rand(5, 3, 40, generator=torch.Generator().manual_seed(3))
    lengths = chain_lengths(
        rows.supervised, rows.segments, uniforms, retention=retention, min_retention=minimum
    )
    for row in range(3):
        kept = naive_cod(
            rows.supervised[row].tolist(), rows.segments[row].tolist(), uniforms[:, row], retention, minimum
        )
        for depth in range(1, 6):
            mine = {a + depth for a in range(40) if lengths[row, a] >= depth}
            assert mine == kept[depth - 1]
            # Prefix-closed: (p, k) kept implies (p - 1, k - 1) kept.
            if depth > 1:
                assert {p - 1 for p in kept[depth - 1]} <= kept[depth - 2]
            count = int(rows.supervised[row].sum())
            bound = capacities(count, 40, 6, retention=retention, min_retention=minimum)
            assert len(kept[depth - 1]) <= bound[depth - 1]


def test_sizes_of_one_long_document():
    batch = make_batch([[103]], 104, prompt=2)
    rows = draft_rows(batch)
    uniforms = torch.rand(7, 1, 104, generator=torch.Generator().manual_seed(0))
    lengths = chain_lengths(rows.supervised, rows.segments, uniforms, retention=0.8)
    sizes = [int((lengths >= depth).sum()) for depth in range(1, 8)]
    count = int(rows.supervised.sum())
    assert count == 101
    assert sizes[0] == math.floor(100 * 0.8)
    for depth, size in enumerate(sizes, start=1):
        # Chains that run into the end of the document may leave a depth a little short of its share.
        assert size <= math.floor((count - depth) * 0.8**depth)
        assert size >= math.floor((count - depth) * 0.8**depth) - 2 * depth


def test_different_seeds_draw_different_rollouts_and_the_same_seed_the_same():
    batch = make_batch([[60]], 64)
    objective = PEagleObjective(num_depths=4)
    rows = draft_rows(batch)
    first, again, other = (objective.slots(rows, seed=s, max_supervised=60) for s in (1, 1, 2))
    assert torch.equal(first.anchors, again.anchors)
    assert not torch.equal(first.anchors, other.anchors)


def test_layout_puts_every_kept_slot_in_its_block_once():
    batch = make_batch([[20, 18], [38], [4, 4, 4]], 40, prompt=3)
    rows = draft_rows(batch)
    uniforms = torch.rand(4, 3, 40, generator=torch.Generator().manual_seed(5))
    lengths = chain_lengths(rows.supervised, rows.segments, uniforms, retention=0.8)
    blocks = capacities(int(rows.supervised.sum(1).max()), 40, 5, retention=0.8)
    slots = chain_slots(rows, lengths, blocks)
    assert slots.anchors.shape == (3, 40 + sum(blocks))
    for row in range(3):
        wanted = {(a, k) for a in range(40) for k in range(1, int(lengths[row, a]) + 1)}
        pairs = list(zip(slots.anchors[row].tolist(), slots.depths.tolist(), strict=True))
        real = [pair for pair, s in zip(pairs[40:], slots.segments[row, 40:].tolist(), strict=True) if s >= 0]
        assert len(real) == len(set(real))
        assert set(real) == wanted
        assert pairs[:40] == [(a, 0) for a in range(40)]
        # Every kept slot of depth >= 1 is supervised: COD draws among supervised rows only.
        assert bool(slots.supervised[row, 40:][slots.segments[row, 40:] >= 0].all())


def test_the_bound_holds_the_supervised_slots():
    objective = PEagleObjective(num_depths=8)
    for seed in range(5):
        batch = make_batch([[30, 9], [40], [3, 3, 3, 12]], 40, seed=seed)
        rows = draft_rows(batch)
        counts = rows.supervised.sum(1).tolist()
        slots = objective.slots(rows, seed=seed, max_supervised=max(counts))
        assert int(slots.supervised.sum()) <= objective.bound(counts)


def test_full_lengths_go_as_deep_as_the_supervised_text():
    batch = make_batch([[7, 5]], 12, prompt=3)
    rows = draft_rows(batch)
    supervised = set(rows.supervised[0].nonzero().flatten().tolist())
    lengths = full_lengths(rows.supervised, rows.segments, 4)[0].tolist()
    for anchor in range(12):
        depth = 0
        while depth < 3 and anchor + depth + 1 in supervised and rows.segments[0, anchor] >= 0:
            if rows.segments[0, anchor + depth + 1] != rows.segments[0, anchor]:
                break
            depth += 1
        assert lengths[anchor] == depth
