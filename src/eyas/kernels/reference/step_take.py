"""Read a step's requests out of the state rows: what the target's forward and the drafter start from."""

from typing import NamedTuple

import torch
from torch import Tensor


class Source(NamedTuple):
    """State of all request slots; S + 1 rows, the last one padding."""

    last_token: Tensor
    """int64 [S + 1]"""
    length: Tensor
    """int64 [S + 1]"""
    live: Tensor
    """bool [S + 1]"""
    drafts: Tensor
    """int64 [S + 1, most]"""
    draft_limit: Tensor
    """int64 [S + 1], drafts from here on do not count"""
    page_table: Tensor
    """int32 [S + 1, P]"""
    temperature: Tensor
    """float32 [S + 1]"""
    seeds: Tensor
    """int64 [S + 1]"""


class Taken(NamedTuple):
    """The same of B requests with K drafts, R = K + 1 rows, each."""

    token_ids: Tensor
    """int64 [B, R]: last token and drafts, 0 in the place of missing ones"""
    drafts: Tensor
    """int64 [B, K]; -1 for none"""
    start: Tensor
    """int64 [B], length"""
    counts: Tensor
    """int64 [B]: R, or 0 where the row is off"""
    page_table: Tensor
    """int32 [B, P]"""
    temperature: Tensor
    """float32 [B]"""
    seeds: Tensor
    """int64 [B]"""


def take(slots: Tensor, source: Source, num_drafts: int, max_len: int | None = None) -> Taken:
    """Rows of slots int64 [B], with the first num_drafts drafts.

    With `max_len` (trees) row r stands at index length + r: drafts at max_len or past it have no page and are
    none.

    Example, slot 2 with last token 15, drafts [7, 8, 9], draft_limit 2, K = 3:
        token_ids [15, 7, 8, 0]   drafts [7, 8, -1]
    """
    index = torch.arange(num_drafts, device=slots.device)
    start = source.length[slots]
    drafts = source.drafts[slots, :num_drafts]
    drafts = torch.where(index < source.draft_limit[slots].unsqueeze(1), drafts, -1)
    if max_len is not None:
        drafts = torch.where(start.unsqueeze(1) + 1 + index < max_len, drafts, -1)
    return Taken(
        token_ids=torch.cat((source.last_token[slots].unsqueeze(1), drafts.clamp_min(0)), dim=1),
        drafts=drafts,
        start=start,
        counts=source.live[slots] * (num_drafts + 1),
        page_table=source.page_table[slots],
        temperature=source.temperature[slots],
        seeds=source.seeds[slots],
    )
