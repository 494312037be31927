"""Forced acceptance of a chain, for timing (verify/forced_lossy): choices and drafts made to agree.

Legend: B requests, R = K + 1 rows, P entries of the table.
"""

import torch
from torch import Tensor

STRIDE = 7919
"""Requests read the table this far apart; a prime."""


def forced_lengths(start: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """How many drafts a request accepts in this step, int64 [B]: the entry at start + slot * STRIDE."""
    return table[(start + slots * STRIDE) % table.shape[0]]


def force(
    choices: Tensor, drafts: Tensor, start: Tensor, slots: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Choices [B, R] and drafts [B, K] that agree up to the forced length and not further.

    Example, K = 3, forced length 2:
        choices [[5, 6, 7, 8]]   drafts [[1, 2, 3]]   ->   [[1, 2, 7, 8]]   [[1, 2, -1]]

    Args:
        choices: int64 [B, R], the target's.
        drafts: int64 [B, K]; -1 (none) only behind all others, and never accepted.
        start: int64 [B], positions.
        slots: int64 [B].
        table: int64 [P].
    """
    index = torch.arange(drafts.shape[1], device=drafts.device)
    kept = (index < forced_lengths(start, slots, table).unsqueeze(1)) & (drafts >= 0)
    forced = torch.cat((torch.where(kept, drafts, choices[:, :-1]), choices[:, -1:]), dim=1)
    return forced, torch.where(kept, drafts, -1)
