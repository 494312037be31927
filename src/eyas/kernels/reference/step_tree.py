"""Draft trees inside a step: the shape that parents describe, and the path that the target's choices take.

Row 0 of a tree is its root, the last committed token; drafted nodes follow, parents before children, R <= 63
rows in all. Sets of rows are bits of a non-negative int64: bit j for row j.

Example, the tree of core/tree:   parents [[0, 0, 0, 1]]   depths [[0, 1, 1, 2]]   bits [[1, 3, 5, 11]]
"""

import torch
from torch import Tensor


def tree_shape(draft_parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ancestor bits int64 [B, R] of trees whose drafts hang below draft_parents [B, N].

    The root is its own parent, so that walks upwards end there; a row is among its own ancestors. `max_depth`
    bounds the depths: each round doubles the distance that a row has looked up.
    """
    num_requests, num_drafts = draft_parents.shape
    row = torch.arange(num_drafts + 1, device=draft_parents.device).expand(num_requests, -1)
    parents = torch.cat((row[:, :1], draft_parents), dim=1)
    above, depths, bits = parents, (row > 0).long(), torch.ones_like(row) << row
    for _ in range(max_depth.bit_length()):
        bits = bits | bits.gather(1, above)
        depths = depths + depths.gather(1, above)
        above = above.gather(1, above)
    return parents, depths, bits


def accept_path(
    choices: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, bits: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk down from the root as long as a child equals the choice; D is max_depth.

    A node is on the accepted path iff it and all nodes above it equal the choices of their parents: no loop
    over depths is needed. The deepest such node is the end of the path (of equal siblings, the first).

    Example, parents [0, 0, 0, 1], tokens [9, 5, 6, 7], choices [5, 7, 8, 4], D 2:
        tokens [5, 7, 4]   counts 3   nodes [0, 1, 3]

    Args:
        choices: int64 [B, R].
        tokens: int64 [B, R], the root's first (its value does not matter); -1 for no draft, which nothing
            equals.
        parents: of `tree_shape`, as are depths and bits.
        depths: see there.
        bits: see there.
        max_depth: D, at least the largest depth.

    Returns:
        Tokens int64 [B, D + 1], the choices along the path; counts int64 [B], accepted nodes and one; nodes
        int64 [B, D + 1], the accepted row at each depth, from counts on the deepest one again.
    """
    row = torch.arange(tokens.shape[1], device=tokens.device)
    right = (choices.gather(1, parents) == tokens) | (row == 0)
    wrong_bits = ((~right).long() << row).sum(1, keepdim=True)
    on_path = (bits & wrong_bits) == 0
    last = torch.where(on_path, depths, -1).argmax(1, keepdim=True)
    depth = torch.arange(max_depth + 1, device=tokens.device)
    num_accepted = depths.gather(1, last)
    # The path's rows ascend with their depths: each is scattered to its depth, others to a spare column.
    in_path = (bits.gather(1, last) >> row) & 1
    where = torch.where(in_path.bool(), depths, max_depth + 1)
    path = last.repeat(1, max_depth + 2).scatter(1, where, row.expand_as(where))[:, :-1]
    nodes = torch.where(depth <= num_accepted, path, last)
    return choices.gather(1, nodes), num_accepted.squeeze(1) + 1, nodes
