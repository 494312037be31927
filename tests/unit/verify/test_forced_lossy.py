"""Forced acceptance against a loop over requests, and its mean."""

import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.core.tree_rows import TreeRows
from eyas.verify.forced_lossy import acceptance_rates, force_lossy
from eyas.verify.greedy import accept_by_match
from eyas.verify.tree import accept_tree


def test_rates_are_those_of_least_variance():
    assert acceptance_rates(3.75, 5) == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert acceptance_rates(1.0, 2) == [0.0, 0.0]
    assert acceptance_rates(3.0, 2) == [1.0, 1.0]


@pytest.mark.parametrize("mean", [0.9, 4.1, -1.0])
def test_a_mean_that_no_step_can_have(mean):
    with pytest.raises(ConfigError, match="1 to 4"):
        acceptance_rates(mean, 3)


def expected_chain(choices, drafts, rates, uniforms):
    tokens = []
    for draft, rate, number in zip(drafts, rates, uniforms, strict=True):
        if draft < 0 or number >= rate:
            break
        tokens.append(draft)
    return [*tokens, choices[len(tokens)]]


def test_chains_against_a_loop():
    torch.manual_seed(0)
    choices, drafts = torch.randint(0, 3, (200, 6)), torch.randint(-1, 3, (200, 5))
    rates, uniforms = torch.tensor([0.9, 0.8, 0.7, 0.5, 0.5]), torch.rand(200, 5)
    accepted = accept_by_match(*force_lossy(choices, drafts, rates, uniforms))
    for row in range(200):
        wanted = expected_chain(
            choices[row].tolist(), drafts[row].tolist(), rates.tolist(), uniforms[row].tolist()
        )
        assert accepted.tokens[row, : accepted.counts[row]].tolist() == wanted


def test_the_mean_is_the_one_that_was_asked_for():
    torch.manual_seed(1)
    drafts, choices = torch.zeros(4000, 7).long(), torch.zeros(4000, 8).long()
    rates = torch.tensor(acceptance_rates(3.7, 7))
    counts = accept_by_match(*force_lossy(choices, drafts, rates, torch.rand(4000, 7))).counts
    # Bernoulli(0.7) of 4,000 requests: five standard errors are 0.036.
    assert set(counts.tolist()) == {3, 4}
    assert abs(counts.double().mean().item() - 3.7) < 0.036


def expected_path(parents, tokens, choices, rates, uniforms):
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    node = depths.index(max(depths))
    path = []
    while node:
        path.insert(0, node)
        node = parents[node - 1]
    result, last = [], 0
    for node, rate, number in zip(path, rates, uniforms, strict=False):
        if tokens[node - 1] < 0 or number >= rate:
            break
        result.append(tokens[node - 1])
        last = node
    return [*result, choices[last]], last


def test_trees_against_a_walk():
    torch.manual_seed(2)
    shapes = [[0, 0, 0, 1, 1, 4, 3], [0, 1, 2, 3, 0, 0, 0], [0, 0, 2, 2, 3, 5, 5]]
    for parents in shapes:
        tree = TreeRows.from_parents(torch.tensor([parents] * 50), 6)
        tokens = torch.stack([torch.randperm(9)[:7] for _ in range(50)])
        tokens[torch.rand(50, 7) < 0.1] = -1
        # Choices that are often a sibling: nothing but the drawn path may be accepted.
        choices = torch.randint(0, 9, (50, 8))
        rates, uniforms = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), torch.rand(50, 6)
        forced, drafts = force_lossy(choices, tokens, rates, uniforms, tree)
        accepted = accept_tree(forced, torch.cat((forced[:, :1], drafts), 1), tree, 6)
        for row in range(50):
            wanted, last = expected_path(
                parents, tokens[row].tolist(), choices[row].tolist(), rates.tolist(), uniforms[row].tolist()
            )
            count = int(accepted.counts[row])
            assert accepted.tokens[row, :count].tolist() == wanted
            assert int(accepted.nodes[row, count - 1]) == last
