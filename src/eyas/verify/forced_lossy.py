"""Forced acceptance, for timing only: how many drafts are accepted is drawn, not decided by the target.

Random heads are never right, so a step with them would accept nothing. Here a request accepts a drawn number
of its drafts, as vLLM's "synthetic" rejection does: the real draft tokens, then the token that the target
chose behind them. Output is no longer the target's; everything else in a step is as ever.

A mean of L tokens a step (the target's own included) is met with the least variance: every step commits
floor(L) or floor(L) + 1 tokens. The numbers are drawn beforehand into a table that is read at a place given
by position and slot, so that a timed step pays one small launch for them.
"""

import math

import torch
from torch import Tensor

from eyas.core.errors import ConfigError
from eyas.core.tree_rows import TreeRows
from eyas.kernels import dispatch_step
from eyas.kernels.reference.step_force import forced_lengths

TABLE_SIZE = 65521
"""A prime, so that no walk through the table is short."""


def acceptance_table(
    mean_tokens: float, depth: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Accepted drafts of TABLE_SIZE steps, int64, shuffled; their mean is mean_tokens - 1.

    Example: mean_tokens 3.75 gives 2 for a quarter of the entries and 3 for the others.
    """
    if not 1.0 <= mean_tokens <= depth + 1:
        raise ConfigError(
            f"acceptance={mean_tokens}: a step of {depth} drafts commits 1 to {depth + 1} tokens"
        )
    fewest = math.floor(mean_tokens - 1)
    num_more = round((mean_tokens - 1 - fewest) * TABLE_SIZE)
    lengths = torch.full((TABLE_SIZE,), fewest, dtype=torch.int64)
    lengths[:num_more] += 1
    order = torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(seed))
    return lengths[order].to(device)


def force_lossy(
    choices: Tensor,
    drafts: Tensor,
    start: Tensor,
    slots: Tensor,
    table: Tensor,
    tree: TreeRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Choices and drafts that agree as far as the table says, for `accept_by_match` and `accept_tree`.

    Chains: see kernels' `force`. In a tree the drafts on the (first) deepest path are the ones accepted.

    Args:
        choices: int64 [B, R], the target's at every row.
        drafts: int64 [B, R - 1]; -1 (no draft) is never accepted, nor what comes after it.
        start: int64 [B], positions.
        slots: int64 [B].
        table: int64 [P], see `acceptance_table`.
        tree: shapes; None for a chain.
    """
    if tree is None:
        return dispatch_step.force(choices, drafts, start, slots, table)
    lengths = forced_lengths(start, slots, table).unsqueeze(1)
    rows = torch.arange(choices.shape[1], device=choices.device)
    tokens = torch.cat((choices[:, :1], drafts), dim=1)
    deepest = tree.depths.argmax(1, keepdim=True)
    on_path = ((tree.ancestor_bits.gather(1, deepest) >> rows) & 1).bool()
    missing = ((tokens < 0).long() << rows).sum(1, keepdim=True)
    real = (tree.ancestor_bits & missing) == 0
    kept = on_path & real & (rows > 0) & (tree.depths <= lengths)
    # A kept node is what its parent chooses; all others write to a spare column.
    where = torch.where(kept, tree.parents, choices.shape[1])
    padded = torch.cat((choices, choices[:, :1]), dim=1)
    return padded.scatter(1, where, tokens)[:, :-1], torch.where(kept[:, 1:], drafts, -1)
