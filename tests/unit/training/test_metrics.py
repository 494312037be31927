import itertools

import torch

from eyas.training.metrics import AcceptanceCount, on_grid


def test_acceptance_against_a_loop_over_anchors():
    g = torch.Generator().manual_seed(0)
    hits, supervised, on_path = (torch.rand(2, 30, 4, generator=g) < p for p in (0.7, 0.9, 0.8))
    count = AcceptanceCount(4)
    count.add(hits, supervised, on_path)
    reached, right = [0] * 4, [0] * 4
    for row, anchor in itertools.product(range(2), range(30)):
        for depth in range(4):
            if not supervised[row, anchor, depth]:
                break
            reached[depth] += 1
            if not hits[row, anchor, depth]:
                break
            right[depth] += 1
            if not on_path[row, anchor, depth]:
                break
    assert count.reached == reached
    assert count.right == right


def test_simulated_acceptance_length():
    count = AcceptanceCount(3)
    count.reached, count.right = [10, 5, 2], [5, 2, 1]
    assert count.acceptance == [0.5, 0.4, 0.5]
    assert abs(count.simulated_al - (1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.5)) < 1e-12


def test_grid_places_slots_by_anchor_and_depth():
    anchors, depths = torch.tensor([[0, 1, 1]]), torch.tensor([0, 0, 1])
    grid = on_grid(torch.tensor([[True, False, True]]), anchors, depths, 3, 2)
    assert grid.tolist() == [[[True, False], [False, True], [False, False]]]
