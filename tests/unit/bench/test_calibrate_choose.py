"""The choice of a shape against a search over everything, and the pieces by hand."""

import random

import pytest

from eyas.bench.calibrate_choose import Choice, Shape, chain_lengths, choose, estimates, interpolate


def test_lengths_add_up_the_depths():
    assert chain_lengths([]) == [1.0]
    assert chain_lengths([0.5, 0.25, 0.25]) == [1.0, 1.5, 1.75, 2.0]


def test_lengths_are_moved_to_what_was_measured():
    shares = [0.5, 0.25, 0.25, 0.125]
    assert chain_lengths(shares, {4: 2.125}) == chain_lengths(shares)
    # K = 2 commits 0.1 more than its depths of the long chain add up to, K = 3 half of that.
    assert chain_lengths(shares, {2: 1.85, 4: 2.125}) == pytest.approx([1.0, 1.5, 1.85, 2.05, 2.125])
    # A drafter that makes no more than three has no depth for K = 9.
    assert chain_lengths(shares[:3], {3: 2.0, 9: 3.0}) == [1.0, 1.5, 1.75, 2.0]


def test_points_are_joined_by_straight_lines():
    points = {1: 10.0, 3: 14.0, 7: 16.0}
    assert [interpolate(points, k) for k in range(1, 8)] == [10, 12, 14, 14.5, 15, 15.5, 16]
    with pytest.raises(AssertionError):
        interpolate(points, 8)


def test_drafting_nothing_is_not_on_the_line_of_the_chains():
    found = estimates(2, {0: 1.0, 2: 3.0, 4: 5.0}, [1.0, 1.5, 2.0, 2.5, 3.0], {}, {})
    # K = 1 was not timed, and the drafter's first forward is not part of a plain step.
    assert set(found) == {Shape(0), Shape(2), Shape(3), Shape(4)}
    assert found[Shape(0)] == 2000
    assert found[Shape(3)] == 1e3 * 2 * 2.5 / 4.0


def test_depths_that_nothing_is_known_of_are_left_out():
    found = estimates(1, {0: 1.0, 1: 1.5, 15: 4.0}, [1.0, 1.8, 2.4], {}, {})
    assert set(found) == {Shape(0), Shape(1), Shape(2)}


def brute_force(batch, chain_ms, lengths, tree_ms, tree_lengths):
    """Every K by walking along the segments one unit at a time."""
    rates = {Shape(0): batch * 1000 / chain_ms[0]}
    timed = sorted(k for k in chain_ms if k)
    for left, right in zip(timed, timed[1:] or timed, strict=False):
        for k in range(left, right + 1):
            if k < len(lengths):
                slope = (chain_ms[right] - chain_ms[left]) / max(right - left, 1)
                rates[Shape(k)] = batch * 1000 * lengths[k] / (chain_ms[left] + slope * (k - left))
    for shape in tree_ms:
        rates[shape] = batch * 1000 * tree_lengths[shape] / tree_ms[shape]
    return rates


def test_choices_against_a_search_over_everything():
    rng = random.Random(0)
    winners = set()
    for _ in range(200):
        shares, share = [], 1.0
        for _ in range(15):
            share *= rng.uniform(0.5, 1.0)
            shares.append(share)
        trees = [Shape(6, "3x2x6"), Shape(16, "5x4x16")][: rng.randrange(3)]
        by_batch, expected = {}, {}
        for batch in (1, 8, 64):
            ms = {0: rng.uniform(3, 5)}
            for k in sorted(rng.sample(range(1, 16), 4)):
                ms[k] = max(ms.values()) + rng.uniform(0, 9)
            tree_ms = {tree: rng.uniform(4, 9) for tree in trees}
            lengths = {tree: rng.uniform(2, 5) for tree in trees}
            arguments = (batch, ms, chain_lengths(shares), tree_ms, lengths)
            by_batch[batch] = estimates(*arguments)
            searched = brute_force(*arguments)
            assert by_batch[batch] == pytest.approx(searched)
            expected[batch] = max(searched.values())
        choices = choose(by_batch)
        assert [c.max_batch for c in choices] == [1, 8, 64]
        for choice in choices:
            assert choice.tokens_per_second == pytest.approx(expected[choice.max_batch])
            rates = by_batch[choice.max_batch]
            assert rates[Shape(choice.chain_k)] == max(rates[s] for s in rates if s.tree is None)
            winners.add("tree" if choice.tree else "plain" if choice.k == 0 else "chain")
    assert winners == {"tree", "plain", "chain"}


def test_of_equals_the_one_that_drafts_least():
    rates = {Shape(3): 10.0, Shape(2): 10.0, Shape(6, "3x2x6"): 10.0, Shape(0): 9.0}
    assert choose({4: rates}) == [Choice(4, 2, None, 10.0, 2)]


def test_a_tree_leaves_word_of_the_best_chain():
    rates = {Shape(0): 9.0, Shape(3): 10.0, Shape(4): 8.0, Shape(6, "3x2x6"): 12.0}
    assert choose({1: rates}) == [Choice(1, 6, "3x2x6", 12.0, 3)]
