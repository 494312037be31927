"""The vectorised trees against lists and heaps."""

import itertools

import naive_tree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.peagle.tree_policy import best_first
from eyas.drafters.tree_pool import TreePool


def random_log_q(generator, *shape):
    """Falling log q; sharpness differs from row to row."""
    sharp = torch.rand((*shape[:-1], 1), generator=generator) * 3 + 0.1
    logits = torch.randn((*shape[:-1], shape[-1] + 3), generator=generator) * sharp
    return logits.double().log_softmax(-1).sort(-1, descending=True).values[..., : shape[-1]].float()


@st.composite
def budgets(draw):
    depth, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    most = min(62, top_k + (depth - 1) * top_k**2)
    return TreeBudget(depth, top_k, draw(st.integers(depth, most)))


@given(budgets(), st.integers(0, 2**32))
def test_best_first_equals_a_heap(budget, seed):
    generator = torch.Generator().manual_seed(seed)
    log_q = random_log_q(generator, 2, budget.depth, budget.top_k)
    tokens = torch.randperm(2 * budget.depth * budget.top_k, generator=generator).view_as(log_q)

    got, parents = best_first(tokens, log_q, budget.num_draft_tokens)

    for b in range(2):
        levels = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(tokens[b].tolist(), log_q[b].tolist(), strict=True)
        ]
        want = naive_tree.best_first(levels, budget.num_draft_tokens)
        assert naive_tree.paths(got[b].tolist(), parents[b].tolist()) == want


def test_best_first_docstring():
    tokens, log_q = torch.tensor([[[5, 6], [7, 8]]]), torch.tensor([[[-0.1, -3.0], [-0.2, -2.0]]])
    drafts, parents = best_first(tokens, log_q, 3)
    assert drafts.tolist() == [[5, 7, 8]]
    assert parents.tolist() == [[0, 1, 1]]


@given(budgets(), st.integers(0, 2**32))
def test_pool_equals_expand_and_rerank(budget, seed):
    """Every node of a table of all paths has children of its own."""
    generator = torch.Generator().manual_seed(seed)
    table = {}

    def below(path):
        if path not in table:
            table[path] = random_log_q(generator, 1, budget.top_k)[0].tolist()
        return list(enumerate(table[path]))

    pool = TreePool(1, budget.depth * budget.top_k**2, torch.device("cpu"), children=True)
    frontier, nodes = None, [()]
    for depth in range(budget.depth):
        log_q = torch.tensor([[[value for _, value in below(path)] for path in nodes]])
        tokens = torch.arange(budget.top_k).expand(1, len(nodes), -1)
        frontier = pool.grow(frontier, tokens, log_q, budget.top_k, depth * budget.top_k)
        offered = [(*path, token) for path in nodes for token in range(budget.top_k)]
        chosen = zip(frontier.above[0].tolist(), frontier.tokens[0].tolist(), strict=True)
        nodes = [offered[node * budget.top_k + token] for node, token in chosen]
        # A node's bits: its own, and one at each depth above it.
        assert all(
            bits.bit_count() == depth + 1 for bits in frontier.bits[0].tolist() if depth * budget.top_k < 60
        )
    tokens, parents = pool.best(budget.num_draft_tokens)

    got = naive_tree.paths(tokens[0].tolist(), parents[0].tolist())
    assert got == naive_tree.expand_and_rerank(below, budget.depth, budget.top_k, budget.num_draft_tokens)
    assert (0,) * budget.depth in got, "the chain"


def test_equal_scores_keep_parents_first():
    """log q = 0 all the way: children score as much as their parents, and still no node lacks its own."""
    tokens, log_q = torch.arange(8).view(1, 4, 2), torch.zeros(1, 4, 2)
    for num_nodes in range(4, 14):
        drafts, parents = best_first(tokens, log_q, num_nodes)
        found = naive_tree.paths(drafts[0].tolist(), parents[0].tolist())
        assert all(path[:-1] in found or len(path) == 1 for path in found)


def test_a_small_tree_by_hand():
    """The module's example: 3 of 6 candidates."""
    pool = TreePool(1, 6, torch.device("cpu"), children=True)
    frontier = pool.grow(None, torch.tensor([[[5, 6]]]), torch.tensor([[[-0.1, -3.0]]]), 2)
    assert frontier.entries.tolist() == [[0, 1]]
    assert frontier.bits.tolist() == [[0b1, 0b10]]
    log_q = torch.tensor([[[-0.2, -2.0], [-0.1, -4.0]]])
    frontier = pool.grow(frontier, torch.tensor([[[7, 8], [9, 4]]]), log_q, 2, 2)
    assert frontier.tokens.tolist() == [[7, 8]]
    assert frontier.above.tolist() == [[0, 0]]
    assert frontier.bits.tolist() == [[0b101, 0b1001]]
    tokens, parents = pool.best(3)
    assert tokens.tolist() == [[5, 7, 8]]
    assert parents.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize(
    "text", ["", "5", "5x4", "5x4x24x1", "axbxc", "0x4x4", "3x0x3", "5x4x4", "2x2x7", "9x9x63"]
)
def test_budgets_that_are_none(text):
    with pytest.raises(ConfigError, match="tree"):
        TreeBudget.parse(text)


def test_budget():
    budget = TreeBudget.parse(" 5x4X24")
    assert budget == TreeBudget(depth=5, top_k=4, num_draft_tokens=24)
    assert str(budget) == "5x4x24"
    assert budget.num_nodes == 25
    assert all(TreeBudget.parse(str(b)) == b for b in itertools.starmap(TreeBudget, [(1, 1, 1), (7, 8, 62)]))
