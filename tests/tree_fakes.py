"""Drafters of trees for tests: random heads, and oracles that hide the right path among nonsense."""

from typing import Any

import torch

from eyas.core.batch import Committed, Draft
from eyas.core.tree import TreeBudget
from eyas.drafters.eagle3.propose_tree import Eagle3TreeDrafter
from eyas.drafters.peagle.propose_tree import PEagleTreeDrafter
from eyas.targets.base import Target
from fakes import FeatureSpy, OracleDrafter, random_head


class TreeOracle(OracleDrafter):
    """Trees of random shape; below a right node stands the right continuation with probability `skill`."""

    def __init__(self, budget: TreeBudget, answers: list[list[int]], *, vocab_size: int) -> None:
        super().__init__(budget.num_draft_tokens, answers, skill=0.85, vocab_size=vocab_size)
        self.tree = budget

    def propose(self, committed: Committed) -> Draft:
        return grow(self, committed)


class TreeSpy(FeatureSpy):
    """Compares the rows that it is given with a whole forward, and drafts trees."""

    def __init__(self, target: Target, budget: TreeBudget, answers: list[list[int]]) -> None:
        super().__init__(target, budget.num_draft_tokens, answers, skill=0.85)
        self.tree = budget

    def propose(self, committed: Committed) -> Draft:
        self._check(committed)
        return grow(self, committed)


def grow(oracle: Any, committed: Committed) -> Draft:
    """One random tree a request."""
    budget, generator = oracle.tree, oracle.generator
    num_requests, num_nodes = committed.start.numel(), budget.num_draft_tokens
    tokens = torch.full((num_requests, num_nodes), -1)
    parents = torch.zeros((num_requests, num_nodes), dtype=torch.int64)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    for b in range(num_requests):
        known = committed.history[b, : int(committed.start[b] + committed.counts[b]) + 1].tolist()
        right = next((a[len(known) :] for a in oracle.answers if a[: len(known)] == known), [])
        depths, good, used = [0], [True], {0: set()}
        for node in range(1, num_nodes + 1):
            shallow = [row for row, depth in enumerate(depths) if depth < budget.depth]
            # The deepest right row half of the time, so that long paths occur.
            best = max((row for row in shallow if good[row]), key=lambda row: depths[row], default=0)
            parent = best if number(2) else shallow[number(len(shallow))]
            depth = depths[parent] + 1
            wanted = right[depth - 1] if good[parent] and depth <= len(right) else None
            lucky = float(torch.rand((), generator=generator)) < oracle.skill
            if wanted is not None and wanted not in used[parent] and lucky:
                token = wanted
            else:
                free = [t for t in range(oracle.vocab_size) if t not in used[parent] and t != wanted]
                token = free[number(len(free))] if number(8) else -1
            used[parent].add(token)
            used[node] = set()
            depths.append(depth)
            good.append(token == wanted and wanted is not None)
            tokens[b, node - 1], parents[b, node - 1] = token, parent
    return Draft(tokens, parents=parents)


def tree_head(target: Target, kind: str, shape: str, answers: Any = ()) -> Any:
    """A drafter of trees: "eagle3" and "peagle" with the weights of fakes.random_head, "oracle" or "spy"."""
    budget = TreeBudget.parse(shape)
    if kind == "oracle":
        return TreeOracle(budget, list(answers), vocab_size=target.config.vocab_size)
    if kind == "spy":
        return TreeSpy(target, budget, list(answers))
    chain = random_head(target, kind, budget.depth)
    drafter_class = {"eagle3": Eagle3TreeDrafter, "peagle": PEagleTreeDrafter}[kind]
    return drafter_class(chain.model, chain.vocab_map, budget)
