import itertools

import torch

from eyas.training.metrics import AcceptanceCount, on_grid, visited


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


def test_visited_anchors_are_those_of_decoding():
    """Decode text of several answers token by token, as an engine does that starts after each first token."""
    g = torch.Generator().manual_seed(1)
    hits, on_path = (torch.rand(3, 60, 4, generator=g) < p for p in (0.8, 0.9))
    supervised = torch.zeros(3, 60, 4, dtype=torch.bool)
    answers = [(0, 0, 9), (0, 12, 40), (0, 44, 45), (1, 5, 60), (2, 1, 3), (2, 6, 30)]
    for row, begin, end in answers:  # rows begin .. end - 1 guess the tokens of an answer
        for depth in range(4):
            supervised[row, begin : max(end - depth, begin), depth] = True
    count = AcceptanceCount(4)
    count.add(hits, supervised, on_path)
    reached, right, places = [0] * 4, [0] * 4, set()
    for row, begin, end in answers:
        written = 1  # tokens of the answer that are known
        while written < end - begin:
            anchor, good = begin + written, 0
            places.add((row, anchor))
            for depth in range(min(4, end - anchor)):
                reached[depth] += 1
                if not hits[row, anchor, depth]:
                    break
                right[depth] += 1
                if not on_path[row, anchor, depth]:
                    break
                good += 1
            written += good + 1
    assert count.visited_reached == reached
    assert count.visited_right == right
    accepted = (hits & on_path & supervised).long().cumprod(-1).sum(-1)
    found = visited(supervised[..., 0], accepted)
    assert {tuple(place) for place in found.nonzero().tolist()} == places


def test_simulated_acceptance_length():
    count = AcceptanceCount(3)
    count.visited_reached, count.visited_right = [10, 5, 2], [5, 2, 1]
    assert count.visited_acceptance == [0.5, 0.4, 0.5]
    assert abs(count.simulated_al - (1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.5)) < 1e-12


def test_grid_places_slots_by_anchor_and_depth():
    anchors, depths = torch.tensor([[0, 1, 1]]), torch.tensor([0, 0, 1])
    grid = on_grid(torch.tensor([[True, False, True]]), anchors, depths, 3, 2)
    assert grid.tolist() == [[[True, False], [False, True], [False, False]]]
