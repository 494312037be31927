"""Positions, slots and visibility of a forward's rows, from what each request says about itself.

B requests, R rows each, P pages a request. The fields are those of core/batch.ForwardBatch.

Example, page_size 4, one request with pages [7, 2], start 3, R 3, counts 2:
    positions [3, 4, 5]   slots [7*4+3, 2*4+0, -1]   visible [4, 5, 0]   q_start [0, 3]

Packed rows are the same ones in another order: those below their request's count first, request by request,
then all others. q_start [B + 1] says where each request's begin, and its last entry how many count.

Example, R 3, counts [2, 1]: rows (0, 0), (0, 1), (1, 0), then (0, 2), (1, 1), (1, 2); q_start [0, 2, 3].
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Rows(NamedTuple):
    """Fields of B * R rows, request by request."""

    positions: Tensor
    """int64 [B * R]"""
    slots: Tensor
    """int64 [B * R]"""
    visible: Tensor
    """int32 [B * R]"""
    q_start: Tensor
    """int32 [B + 1]"""
    tree_bits: Tensor | None = None
    """int64 [B * R], trees only"""


def page_slots(page_table: Tensor, positions: Tensor, page_size: int, valid: Tensor) -> Tensor:
    """Slots of positions [B, R] under page_table [B, P]: page * page_size + offset, -1 where not valid.

    page_size 4, pages [7, 2]: positions [3, 4, 5] -> [7*4+3, 2*4+0, 2*4+1] = [31, 8, 9].
    Positions past the table are not valid.
    """
    page_index = positions // page_size
    inside = valid & (positions >= 0) & (page_index < page_table.shape[1])
    pages = page_table.gather(1, page_index.clamp(0, page_table.shape[1] - 1)).to(torch.int64)
    return torch.where(inside, pages * page_size + positions % page_size, -1)


def chain_rows(
    start: Tensor,
    counts: Tensor,
    page_table: Tensor,
    rows: int,
    page_size: int,
    max_position: int,
    *,
    packed: bool = False,
) -> Rows:
    """Row j of request b stands at start[b] + j and sees everything up to itself.

    start, counts int64 [B], page_table int32 [B, P]. Rows j >= counts and positions >= max_position are
    padding: slot -1, visible 0.
    """
    index = torch.arange(rows, device=start.device)
    positions = start[:, None] + index
    valid = (index < counts[:, None]) & (positions < max_position)
    slots = page_slots(page_table, positions, page_size, valid)
    visible = torch.where(valid, positions + 1, 0).to(torch.int32)
    flat = Rows(positions.reshape(-1), slots.reshape(-1), visible.reshape(-1), _q_start(positions))
    if not packed:
        return flat
    order = packed_order(counts, rows)
    starts = packed_starts(counts)
    return Rows(flat.positions[order], flat.slots[order], flat.visible[order], starts)


def packed_order(counts: Tensor, rows: int) -> Tensor:
    """Which of B * R rows stands at each place of the packed ones: int64 [B * R]."""
    return (torch.arange(rows, device=counts.device) >= counts[:, None]).reshape(-1).argsort(stable=True)


def packed_starts(counts: Tensor) -> Tensor:
    """q_start of packed rows: int32 [B + 1]."""
    return functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def tree_rows(
    start: Tensor,
    depths: Tensor,
    bits: Tensor,
    page_table: Tensor,
    first: int,
    page_size: int,
    max_position: int,
) -> Rows:
    """Row j of request b is written at KV index start[b] + first + j and stands at start[b] + depths[b, j].

    start int64 [B], depths and bits int64 [B, R]. Rows see [0, start) and their bits; those whose index is
    max_position or more are padding: slot -1, nothing visible.
    """
    index = start[:, None] + first + torch.arange(depths.shape[1], device=start.device)
    valid = index < max_position
    return Rows(
        positions=(start[:, None] + depths).reshape(-1),
        slots=page_slots(page_table, index, page_size, valid).reshape(-1),
        visible=torch.where(valid, start[:, None], 0).to(torch.int32).reshape(-1),
        q_start=_q_start(index),
        tree_bits=torch.where(valid, bits, 0).reshape(-1),
    )


def _q_start(rows: Tensor) -> Tensor:
    """First row of every request, and the end: int32 [B + 1] of rows [B, R]."""
    num_requests, each = rows.shape
    return torch.arange(0, num_requests * each + 1, max(each, 1), dtype=torch.int32, device=rows.device)
