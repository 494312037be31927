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

from torch import Tensor

from eyas.core.tree_rows import TreeRows
from eyas.kernels import dispatch_step


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


def tree_rows(draft_parents: Tensor, max_depth: int) -> TreeRows:
    """Shapes of the trees whose drafts hang below draft_parents int64 [B, N], of at most max_depth."""
    return TreeRows(*dispatch_step.tree_shape(draft_parents, max_depth))


def accept_tree(choices: Tensor, tokens: Tensor, tree: TreeRows, max_depth: int) -> AcceptedPath:
    """Walk down from the root as long as a child equals the choice; see kernels/reference/step_tree.

    Example, parents [0, 0, 0, 1], tokens [9, 5, 6, 7], choices [5, 7, 8, 4]:
        tokens [5, 7, 4]   counts 3   nodes [0, 1, 3]

    Args:
        choices: int64 [B, R].
        tokens: int64 [B, R], the root's first (its value does not matter); -1 for no draft, which nothing
            equals.
        tree: shapes.
        max_depth: D, at least the largest depth.
    """
    return AcceptedPath(*dispatch_step.accept_path(choices, tokens, *tree, max_depth))
