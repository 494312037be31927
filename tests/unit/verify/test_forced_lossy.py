"""Forced acceptance against a loop over requests, and its mean."""

import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.kernels.reference.step_force import STRIDE
from eyas.verify.forced_lossy import acceptance_table, force_lossy
from eyas.verify.greedy import accept_by_match
from eyas.verify.tree import accept_tree, tree_rows


def test_the_table_has_the_mean_and_the_least_variance():
    table = acceptance_table(3.75, 5)
    assert set(table.tolist()) == {2, 3}
    assert table.double().mean().item() == pytest.approx(2.75, abs=1e-5)
    assert set(acceptance_table(1.0, 2).tolist()) == {0}
    assert set(acceptance_table(3.0, 2).tolist()) == {2}
    # Shuffled: no long run of equal lengths.
    assert (table[1:] != table[:-1]).double().mean().item() == pytest.approx(0.375, abs=0.02)


@pytest.mark.parametrize("mean", [0.9, 4.1, -1.0])
def test_a_mean_that_no_step_can_have(mean):
    with pytest.raises(ConfigError, match="1 to 4"):
        acceptance_table(mean, 3)


def walk(num_requests, mean, steps):
    """Tokens of each request in each step, for requests that start where others have been."""
    table, slots = acceptance_table(mean, 7), torch.arange(num_requests)
    start, counts = torch.full((num_requests,), 1000), []
    drafts, choices = torch.zeros(num_requests, 7).long(), torch.ones(num_requests, 8).long()
    for _ in range(steps):
        count = accept_by_match(*force_lossy(choices, drafts, start, slots, table)).counts
        counts.append(count)
        start = start + count
    return torch.stack(counts)


def test_the_mean_is_met_on_the_way():
    counts = walk(64, 3.7, 100)
    assert set(counts.unique().tolist()) == {3, 4}
    # Bernoulli(0.7), 6,400 draws: five standard errors are 0.029.
    assert counts.double().mean().item() == pytest.approx(3.7, abs=0.029)
    # Requests go their own ways: all 64 alike in one step would have the odds 0.7 ** 64.
    assert all(len(step.unique()) == 2 for step in counts)


def lengths_of(table, starts, slots):
    return [table[(p + s * STRIDE) % len(table)] for p, s in zip(starts, slots, strict=True)]


def test_chains_against_a_loop():
    torch.manual_seed(0)
    choices, drafts = torch.randint(0, 3, (200, 6)), torch.randint(0, 3, (200, 5))
    missing = torch.randint(0, 8, (200, 1))
    drafts[torch.arange(5) >= missing] = -1
    table, start, slots = torch.randint(0, 6, (97,)), torch.randint(0, 500, (200,)), torch.randperm(200)
    accepted = accept_by_match(*force_lossy(choices, drafts, start, slots, table))
    lengths = lengths_of(table.tolist(), start.tolist(), slots.tolist())
    for row in range(200):
        tokens = [token for token in drafts[row, : lengths[row]].tolist() if token >= 0]
        wanted = [*tokens, int(choices[row, len(tokens)])]
        assert accepted.tokens[row, : accepted.counts[row]].tolist() == wanted


def expected_path(parents, tokens, choices, length):
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    node = depths.index(max(depths))
    path = []
    while node:
        path.insert(0, node)
        node = parents[node - 1]
    result, last = [], 0
    for node in path[:length]:
        if tokens[node - 1] < 0:
            break
        result.append(tokens[node - 1])
        last = node
    return [*result, choices[last]], last


def test_trees_against_a_walk():
    torch.manual_seed(2)
    shapes = [[0, 0, 0, 1, 1, 4, 3], [0, 1, 2, 3, 0, 0, 0], [0, 0, 2, 2, 3, 5, 5]]
    for parents in shapes:
        tree = tree_rows(torch.tensor([parents] * 50), 6)
        tokens = torch.stack([torch.randperm(9)[:7] for _ in range(50)])
        tokens[torch.rand(50, 7) < 0.1] = -1
        # Choices that are often a sibling: nothing but the forced path may be accepted.
        choices = torch.randint(0, 9, (50, 8))
        table, start, slots = torch.randint(0, 7, (97,)), torch.randint(0, 500, (50,)), torch.arange(50)
        forced, drafts = force_lossy(choices, tokens, start, slots, table, tree)
        accepted = accept_tree(forced, torch.cat((forced[:, :1], drafts), 1), tree, 6)
        lengths = lengths_of(table.tolist(), start.tolist(), slots.tolist())
        for row in range(50):
            wanted, last = expected_path(parents, tokens[row].tolist(), choices[row].tolist(), lengths[row])
            count = int(accepted.counts[row])
            assert accepted.tokens[row, :count].tolist() == wanted
            assert int(accepted.nodes[row, count - 1]) == last
