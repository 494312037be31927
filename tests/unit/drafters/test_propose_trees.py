"""Drafters of trees against a head that recomputes every path from nothing."""

import drafter_rounds
import naive_head
import naive_tree
import pytest
import torch

from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.eagle3.propose_tree import Eagle3TreeDrafter
from eyas.drafters.peagle.propose_tree import PEagleTreeDrafter

FLAGS = [
    {},
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "attention_bias": True},
    {"fc_norm": True, "qk_norm": True, "num_layers": 2},
]


def make(kind, budget, **flags):
    model, vocab_map = drafter_rounds.head(kind, **flags)
    drafter_rounds.in_double(model)
    drafter = (PEagleTreeDrafter if kind == "peagle" else Eagle3TreeDrafter)(model, vocab_map, budget)
    return drafter, naive_head.NaiveHead(model), vocab_map.target_ids


def wanted_paths(reference, sim, b, budget, target_ids):
    tokens, features = sim.tokens[b], sim.features[b][: len(sim.tokens[b]) - 1]
    if reference.config.kind == "peagle":
        _, logits = reference.draft(tokens, features, budget.depth, target_ids)
        log_q = logits.log_softmax(-1)
        levels = [
            sorted(zip(target_ids.tolist(), row.tolist(), strict=True), key=lambda child: -child[1])
            for row in log_q
        ]
        return naive_tree.best_first([level[: budget.top_k] for level in levels], budget.num_draft_tokens)

    def below(path):
        forced = [*path, 0]
        _, logits = reference.draft(tokens, features, len(forced), target_ids, forced=forced)
        return list(zip(target_ids.tolist(), logits[-1].log_softmax(-1).tolist(), strict=True))

    return naive_tree.expand_and_rerank(below, budget.depth, budget.top_k, budget.num_draft_tokens)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        *((kind, flags) for kind in ("eagle3", "peagle") for flags in FLAGS),
        ("peagle", {"encoded_depths": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ["1x3x2", "3x1x3", "3x3x9", "4x3x14"])
def test_trees_equal_recomputing_every_path(kind, flags, shape):
    budget = TreeBudget.parse(shape)
    drafter, reference, target_ids = make(kind, budget, **flags)
    sim = drafter_rounds.Rounds(drafter, lengths=[1, 9, 14], dtype=torch.float64)
    sim.prefill(chunk=5)
    deep = budget.depth
    for accepted in ([0, deep, deep // 2], [deep, 0, 1], [deep // 3, deep // 2, 0]):
        draft = sim.round(accepted, deep)

        assert draft.tokens.shape == draft.parents.shape == (3, budget.num_draft_tokens)
        assert draft.probs is None
        for b in range(sim.num):
            got = naive_tree.paths(draft.tokens[b].tolist(), draft.parents[b].tolist())
            assert got == wanted_paths(reference, sim, b, budget, target_ids)


def test_a_request_at_the_context_limit_leaves_its_neighbour_alone():
    budget = TreeBudget.parse("4x3x12")
    drafter, reference, target_ids = make("eagle3", budget)
    sim = drafter_rounds.Rounds(drafter, lengths=[22, 5], max_len=24, dtype=torch.float64)
    sim.prefill(chunk=8)
    draft = sim.round([0, 2], 4)  # request 0 stands at position 22 of 24

    got = naive_tree.paths(draft.tokens[1].tolist(), draft.parents[1].tolist())
    assert got == wanted_paths(reference, sim, 1, budget, target_ids)
    naive_tree.paths(draft.tokens[0].tolist(), draft.parents[0].tolist())


def test_more_expanded_nodes_than_bits():
    with pytest.raises(ConfigError, match="expands 64 nodes"):
        make("eagle3", TreeBudget(9, 8, 60))
