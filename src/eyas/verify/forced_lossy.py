"""Forced acceptance, for timing only: how many drafts are accepted is drawn, not decided by the target.

Random heads are never right, so a step with them would accept nothing. Here a request accepts its drafts at
given rates, as vLLM's "synthetic" rejection does: the real draft tokens up to a drawn length, then the
token that the target chose there. Output is no longer the target's; everything else in a step is as ever.

A mean of L tokens a step (the target's own included) becomes rates of least variance: every step commits
floor(L) or floor(L) + 1 tokens.
"""

import torch
from torch import Tensor

from eyas.core.errors import ConfigError
from eyas.core.tree_rows import TreeRows


def acceptance_rates(mean_tokens: float, depth: int) -> list[float]:
    """P(draft i accepted | all before it were), for i < depth, that give `mean_tokens` a step.

    >>> acceptance_rates(3.75, 5)
    [1.0, 1.0, 0.75, 0.0, 0.0]
    """
    if not 1.0 <= mean_tokens <= depth + 1:
        raise ConfigError(
            f"acceptance={mean_tokens}: a step of {depth} drafts commits 1 to {depth + 1} tokens"
        )
    return [min(max(mean_tokens - 1 - index, 0.0), 1.0) for index in range(depth)]


def force_lossy(
    choices: Tensor, drafts: Tensor, rates: Tensor, uniforms: Tensor, tree: TreeRows | None = None
) -> tuple[Tensor, Tensor]:
    """Choices and drafts that agree as long as was drawn, for `accept_by_match` and `accept_tree`.

    In a tree the drafts on the (first) deepest path are the ones that are accepted.

    Example, K = 3, rates [1, .5, 0], uniforms [.9, .3, .2]: two drafts are accepted,
        choices [[5, 6, 7, 8]]   drafts [[1, 2, 3]]   ->   [[1, 2, 7, 8]]   [[1, 2, -1]]

    Args:
        choices: int64 [B, R], the target's at every row.
        drafts: int64 [B, R - 1]; -1 (no draft) is never accepted, nor what comes after it.
        rates: [D], see `acceptance_rates`.
        uniforms: [B, D] in (0, 1).
        tree: shapes; None for a chain (D = R - 1).
    """
    drawn = (uniforms < rates).long().cumprod(1)
    if tree is None:
        kept = (drawn * (drafts >= 0).long().cumprod(1)).bool()
        forced = torch.cat((torch.where(kept, drafts, choices[:, :-1]), choices[:, -1:]), dim=1)
        return forced, torch.where(kept, drafts, -1)
    rows = torch.arange(choices.shape[1], device=choices.device)
    tokens = torch.cat((choices[:, :1], drafts), dim=1)
    deepest = tree.depths.argmax(1, keepdim=True)
    on_path = ((tree.ancestor_bits.gather(1, deepest) >> rows) & 1).bool()
    missing = ((tokens < 0).long() << rows).sum(1, keepdim=True)
    real = (tree.ancestor_bits & missing) == 0
    kept = on_path & real & (rows > 0) & (tree.depths <= drawn.sum(1, keepdim=True))
    # A kept node is what its parent chooses; all others write to a spare column.
    where = torch.where(kept, tree.parents, choices.shape[1])
    padded = torch.cat((choices, choices[:, :1]), dim=1)
    return padded.scatter(1, where, tokens)[:, :-1], torch.where(kept[:, 1:], drafts, -1)
