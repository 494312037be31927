"""Acceptance of trees: a naive walk, and the sequential rule of the papers by exact enumeration."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.kernels.reference.random import draw, uniform
from eyas.verify.chi_square import chi_square
from eyas.verify.greedy import accept_by_match
from eyas.verify.tree import accept_tree, tree_rows


def random_tree(generator, num_drafts, vocab_size, max_depth):
    """Parents and distinct sibling tokens, some of them missing (-1)."""
    parents, tokens, depths = [], [], [0]
    for _ in range(num_drafts):
        shallow = [row for row, depth in enumerate(depths) if depth < max_depth]
        parent = shallow[int(torch.randint(len(shallow), (), generator=generator))]
        taken = {t for p, t in zip(parents, tokens, strict=True) if p == parent}
        free = [t for t in range(-1, vocab_size) if t not in taken or t == -1]
        parents.append(parent)
        tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
        depths.append(depths[parent] + 1)
    return parents, tokens


def walk(choices, parents, tokens):
    """Descend by comparing one child after the other."""
    out, nodes, row = [], [0], 0
    while True:
        out.append(choices[row])
        for child, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1):
            if parent == row and token == choices[row]:
                row = child
                nodes.append(row)
                break
        else:
            return out, nodes


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 62), st.integers(1, 7))
def test_equals_a_walk(seed, num_drafts, max_depth):
    generator = torch.Generator().manual_seed(seed)
    trees = [random_tree(generator, num_drafts, 4, max_depth) for _ in range(4)]
    parents = torch.tensor([p for p, _ in trees], dtype=torch.int64).view(4, -1)
    tokens = torch.tensor([t for _, t in trees], dtype=torch.int64).view(4, -1)
    choices = torch.randint(0, 4, (4, num_drafts + 1), generator=generator)
    root = torch.full((4, 1), 3)

    got = accept_tree(choices, torch.cat((root, tokens), 1), tree_rows(parents, max_depth), max_depth)

    assert got.tokens.shape == got.nodes.shape == (4, max_depth + 1)
    for b in range(4):
        out, nodes = walk(choices[b].tolist(), *trees[b])
        count = int(got.counts[b])
        assert got.tokens[b, :count].tolist() == out
        assert got.nodes[b, :count].tolist() == nodes
        assert (got.nodes[b, count:] == nodes[-1]).all()


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_a_chain_is_the_chains_own_rule(seed, num_drafts):
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(0, 2, (5, num_drafts + 1), generator=generator)
    drafts = torch.randint(-1, 2, (5, num_drafts), generator=generator)
    tree = tree_rows(torch.arange(num_drafts).expand(5, -1), num_drafts)

    got = accept_tree(choices, torch.cat((drafts[:, :1], drafts), 1), tree, num_drafts)
    want = accept_by_match(choices, drafts)

    assert torch.equal(got.counts, want.counts)
    for b, count in enumerate(want.counts.tolist()):
        assert torch.equal(got.tokens[b, :count], want.tokens[b, :count])


# Two candidates after the root, two below the first, one below the second; vocabulary of 3.
PARENTS, TOKENS = [0, 0, 1, 1, 2], [1, 2, 0, 2, 1]
VOCAB, DEPTH = 3, 2


def conditional(seed=0):
    """p(token | path) for every path up to two tokens: some mass on everything, none uniform."""
    generator = torch.Generator().manual_seed(seed)
    paths = [path for n in range(DEPTH + 1) for path in itertools.product(range(VOCAB), repeat=n)]
    return {
        path: (torch.randn(VOCAB, generator=generator) * 1.2).double().softmax(-1).tolist() for path in paths
    }


def path_of(row):
    path = ()
    while row:
        path = (TOKENS[row - 1], *path)
        row = PARENTS[row - 1]
    return path


def children(row):
    return [child for child, parent in enumerate(PARENTS, start=1) if parent == row]


def sequential(p):
    """Law of the committed tokens under the published rule: children in turn, residual renormalised."""
    law = {}

    def descend(row, mass):
        left = list(p[path_of(row)])
        for child in children(row):
            token = TOKENS[child - 1]
            descend(child, mass * left[token])
            mass *= 1 - left[token]
            total = sum(left) - left[token]
            left = [0.0 if t == token else q / total for t, q in enumerate(left)]
        for token, q in enumerate(left):
            key = (*path_of(row), token)
            law[key] = law.get(key, 0.0) + mass * q

    descend(0, 1.0)
    return {key: value for key, value in law.items() if value > 0}


def enumerated(p, rule):
    """Law of the committed tokens under `rule`, by running it on all choices of all rows."""
    num_rows = len(PARENTS) + 1
    combos = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_rows)))
    weights = torch.ones(len(combos), dtype=torch.float64)
    for row in range(num_rows):
        weights *= torch.tensor(p[path_of(row)], dtype=torch.float64)[combos[:, row]]
    law = {}
    for tokens, count, weight in zip(*rule(combos), weights.tolist(), strict=True):
        key = tuple(tokens[:count])
        law[key] = law.get(key, 0.0) + weight
    return law


def fixed_trees(num):
    return tree_rows(torch.tensor(PARENTS).expand(num, -1), DEPTH)


def with_root(num):
    return torch.tensor([0, *TOKENS]).expand(num, -1)


def ours(choices):
    accepted = accept_tree(choices, with_root(len(choices)), fixed_trees(len(choices)), DEPTH)
    return accepted.tokens.tolist(), accepted.counts.tolist()


def any_child(choices):
    """Wrong: the path goes to the first child whatever the choice was."""
    nodes = torch.tensor([[0, 1, 3]]).expand(len(choices), -1)
    path = choices.gather(1, nodes).clone()
    path[:, 0], path[:, 1] = TOKENS[0], TOKENS[2]
    return path.tolist(), [3] * len(choices)


def draw_per_child(choices):
    """Wrong: after a child is refused the next one gets a draw of its own from the same p (another row's)."""
    tokens, counts = [], []
    for row in choices.tolist():
        if row[0] == TOKENS[0] or row[0] == TOKENS[1]:
            first = row[0]
        else:
            first = TOKENS[1] if row[2] == TOKENS[1] else row[0]
        tokens.append([first, 0, 0])
        counts.append(1)
    return tokens, counts


def first_tokens(law):
    out = [0.0] * VOCAB
    for key, mass in law.items():
        out[key[0]] += mass
    return out


@pytest.mark.parametrize("seed", range(6))
def test_law_equals_the_sequential_rule_and_the_target(seed):
    p = conditional(seed)
    law, published = enumerated(p, ours), sequential(p)

    assert law.keys() == published.keys()
    for key, mass in published.items():
        assert law[key] == pytest.approx(mass, abs=1e-12)
    # Both say p: whatever was committed continues as the target would.
    assert first_tokens(law) == pytest.approx(p[()], abs=1e-12)
    for key, mass in law.items():
        expected = p[()][key[0]]
        for i in range(1, len(key)):
            expected *= p[key[:i]][key[i]]
        assert mass == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rule", [any_child, draw_per_child])
def test_wrong_rules_have_another_law(rule):
    p = conditional()
    assert first_tokens(enumerated(p, rule)) != pytest.approx(p[()], abs=1e-3)


def keyed_sample(p, num, *, per_depth=1, rule=ours):
    """First two tokens of `num` seeds as the engine draws them: one number for each (seed, position)."""
    seeds, tree = torch.arange(num), fixed_trees(num)
    probs = torch.tensor([p[path_of(row)] for row in range(len(PARENTS) + 1)]).expand(num, -1, -1)
    numbers = uniform(seeds[:, None].expand_as(tree.depths), 40 + per_depth * tree.depths, 0)
    tokens, lengths = map(torch.tensor, rule(draw(probs, numbers)))
    # Where a run ends after one token, the next step continues it: one more draw, at the next position.
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=2), 0)
    after = torch.tensor([p[(token,)] for token in range(VOCAB)])[tokens[:, 0]]
    second = torch.where(lengths > 1, tokens[:, 1], draw(after, numbers[:, 1]))
    for pair in zip(tokens[:, 0].tolist(), second.tolist(), strict=True):
        counts[pair] += 1
    return counts


@pytest.mark.parametrize(
    ("broken", "lawful"),
    [({}, True), ({"per_depth": 0}, False), ({"rule": any_child}, False), ({"rule": draw_per_child}, False)],
    ids=["ours", "one number for all depths", "any child", "a draw for each child"],
)
def test_keyed_draws_have_the_targets_law(broken, lawful):
    """20,000 seeds, two tokens each, steps continued. Broken rules must be noticed."""
    p = conditional(3)
    cells = {(a, b): p[()][a] * p[(a,)][b] for a, b in itertools.product(range(VOCAB), repeat=2)}
    counts = keyed_sample(p, 20_000, **broken)
    p_value = chi_square([counts[cell] for cell in cells], list(cells.values())).p_value

    assert p_value > 1e-3 if lawful else p_value < 1e-6


@pytest.mark.parametrize("ordered_by_luck", [False, True])
def test_sequential_rule_needs_an_order_that_does_not_know_the_draws(ordered_by_luck):
    """The published rule, drawn: the fixed order has the law p; putting lucky candidates first has not."""
    p = conditional(3)[()]
    generator = torch.Generator().manual_seed(0)
    counts = [0] * VOCAB
    for _ in range(6_000):
        *lots, last = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        order = [(lots[0], TOKENS[0]), (lots[1], TOKENS[1])]
        left = list(p)
        for lot, token in sorted(order) if ordered_by_luck else order:
            if lot < left[token]:
                counts[token] += 1
                break
            total = sum(left) - left[token]
            left = [0.0 if t == token else q / total for t, q in enumerate(left)]
        else:
            counts[int(draw(torch.tensor([left]), torch.tensor([last], dtype=torch.float64)))] += 1
    p_value = chi_square(counts, p).p_value

    assert p_value < 1e-6 if ordered_by_luck else p_value > 1e-3
