"""Enter a verification's outcome into the state rows, and report it to the host: all of it in one call.

Legend: B requests in the step, S + 1 state rows, R tokens that a step can commit at most, K drafts, E
end-of-text ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StateRows(NamedTuple):
    """What the engine keeps of every request slot; the tensors are changed in place."""

    last_token: Tensor
    """int64 [S + 1]"""
    length: Tensor
    """int64 [S + 1], cached tokens; the last token stands at this position"""
    live: Tensor
    """bool [S + 1]"""
    history: Tensor
    """int64 [S + 1, at least the largest limit + R]"""
    limit: Tensor
    """int64 [S + 1], how many tokens the request may have"""
    stops_at_eos: Tensor
    """bool [S + 1]"""
    eos_ids: Tensor
    """int64 [E], E may be 0"""


def count_matches(choices: Tensor, drafts: Tensor) -> Tensor:
    """Length of the prefix of drafts that equals the choices, plus one: int64 [B], 1 .. K + 1.

    choices [[5, 9, 4, 7]], drafts [[5, 8, 4]] -> [2]: the first draft, and the choice after it.
    """
    matches = choices[:, :-1] == drafts
    return matches.long().cumprod(1).sum(1) + 1


def settle(
    tokens: Tensor,
    counts: Tensor | None,
    bad_rows: Tensor,
    drafts: Tensor,
    slots: Tensor,
    start: Tensor,
    rows: StateRows,
) -> tuple[Tensor, Tensor]:
    """Advance the state rows by what was accepted; returns (counts int64 [B], report int64 [B, R + 2]).

    A report row holds the R tokens, how many of them count, and how many drafts there were. Count 0 says that
    a token was chosen from logits that were no distribution: the host ends that request with an error.

    A row goes off when it has such a token, reaches its limit, or takes an end-of-text token and stops there.
    Off rows (padding, and requests that ended one step ago) keep everything; their report means nothing.
    All R tokens are written to the history; those past the count are overwritten by the next step.

    Example, R = 4, length 5, limit 9, tokens [d1, b, *, *], counts 2: history[6] = d1, history[7] = b,
    last_token b, length 7, still live; counts 3 would give length 8, the limit of 9 tokens, and go off.

    Args:
        tokens: int64 [B, R].
        counts: int64 [B], 1 .. R; None to count the drafts that equal their tokens (`count_matches`).
        bad_rows: bool [B, R], tokens that came from no distribution.
        drafts: int64 [B, K]; -1 for none.
        slots: int64 [B], distinct except for rows that are off.
        start: int64 [B], rows.length[slots] before the step.
        rows: the state.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device)
    if counts is None:
        counts = count_matches(tokens, drafts)
    taken = index < counts.unsqueeze(1)
    bad = (bad_rows & taken).any(1)
    drafted = (drafts >= 0).sum(1)
    report = torch.cat((tokens, torch.where(bad, 0, counts).unsqueeze(1), drafted.unsqueeze(1)), dim=1)

    live, last_cached = rows.live[slots], rows.limit[slots] - 1
    is_eos = (tokens.unsqueeze(-1) == rows.eos_ids).any(-1)
    stopped = (is_eos & taken).any(1) & rows.stops_at_eos[slots]
    end = start + counts
    columns = start.unsqueeze(1) + 1 + index
    known = rows.history[slots.unsqueeze(1), columns]
    rows.history[slots.unsqueeze(1), columns] = torch.where(live.unsqueeze(1), tokens, known)
    newest = tokens.gather(1, counts.unsqueeze(1) - 1).squeeze(1)
    rows.last_token[slots] = torch.where(live, newest, rows.last_token[slots])
    rows.length[slots] = torch.where(live, torch.minimum(end, last_cached), start)
    rows.live[slots] = live & ~bad & ~stopped & (end < last_cached)
    return counts, report
