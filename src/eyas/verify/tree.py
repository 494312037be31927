"""Accept a path of a tree of point masses: at every node the target's choice names the child or ends it.

The published rule for a node with fixed candidates x1, x2, ... (SpecInfer's with q a point mass; EAGLE's
code) tests them in turn: accept x1 with probability P[x1]; else set P[x1] = 0, renormalise, go on with x2;
when all are rejected the correction comes from what is left of P. By induction candidate x is accepted with
probability p(x) and a token that is no candidate becomes the correction with probability p(x). One draw y
from p does the same: y is a child, and the path descends to it, or y is the correction. The candidates and
their order must not depend on the target's randomness; drafters choose them before it is drawn.

`choices[b, i]` is the target's choice at row i (the argmax, or one draw keyed by (seed, position)), so that
rows of one depth share their random number. Only one row a depth is ever used, and it is the one that plain
decoding would have computed: the output is the same with and without a tree, seed by seed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core.tree_rows import TreeRows


class AcceptedPath(NamedTuple):
    """Tokens to commit, and where in the tree they come from; D is the largest depth.

    Example, the tree of core/tree with "the cat" accepted and then the choice "sat":
        tokens [the, cat, sat]   counts 3   nodes [0, 1, 3]
    """

    tokens: Tensor
    """int64 [B, D + 1]; entry i is real for i < counts, a valid id beyond"""
    counts: Tensor
    """int64 [B], 1 .. D + 1: accepted nodes and one token that the target chose itself"""
    nodes: Tensor
    """int64 [B, D + 1]: row of the accepted node at depth i, 0 at depth 0; for i >= counts the deepest one
    again.
    Its features are those of position start + i, its choice is tokens[i]."""


def accept_tree(choices: Tensor, tokens: Tensor, tree: TreeRows, max_depth: int) -> AcceptedPath:
    """Walk down from the root as long as a child equals the choice.

    A node is on the accepted path iff it and all nodes above it equal the choices of their parents: no loop
    over
    depths is needed. The deepest such node is the end of the path (of equal siblings, the first).

    Example, V of small numbers, parents [0, 0, 0, 1]:
        tokens [[9, 5, 6, 7]]   choices [[5, 7, 8, 4]]   ->   tokens [[5, 7, 4]]   counts [3]   nodes [[0, 1,
        3]]

    Args:
        choices: int64 [B, R].
        tokens: int64 [B, R], the root's first (its value does not matter); -1 for no draft, which nothing
            equals.
        tree: shapes.
        max_depth: D, at least the largest depth.
    """
    row = torch.arange(tokens.shape[1], device=tokens.device)
    right = (choices.gather(1, tree.parents) == tokens) | (row == 0)
    wrong_bits = ((~right).long() << row).sum(1, keepdim=True)
    on_path = (tree.ancestor_bits & wrong_bits) == 0
    last = torch.where(on_path, tree.depths, -1).argmax(1, keepdim=True)
    depth = torch.arange(max_depth + 1, device=tokens.device)
    num_accepted = tree.depths.gather(1, last)
    # The path's rows ascend with their depths, so each row is scattered to its depth; others go to a spare
    # column.
    in_path = (tree.ancestor_bits.gather(1, last) >> row) & 1
    where = torch.where(in_path.bool(), tree.depths, max_depth + 1)
    path = last.repeat(1, max_depth + 2).scatter(1, where, row.expand_as(where))[:, :-1]
    nodes = torch.where(depth <= num_accepted, path, last)
    return AcceptedPath(choices.gather(1, nodes), num_accepted.squeeze(1) + 1, nodes)
