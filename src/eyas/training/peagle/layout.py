"""Lay rollouts out so that the structure is visible: depth-0 rows in order, then one of two orders.

By depth (`chain_slots`, for nn/rollout.py): a block for each depth. Anchors are sorted by how deep they go.
Prefix-closed chains then fill a prefix of every block, and slot c of any block belongs to the same anchor:
own keys are slices and padding is at the blocks' ends.

Chain lengths [1, 2, 0, 0, 1, 0], capacities (4, 1):
    order 1 0 4 | 2 3 5      depth-1 block: anchors 1 0 4 (2)     depth-2 block: anchor 1     (2) is padding

By anchor (`rollout_slots`, for nn/staircase.py): whole rollouts, sorted by anchor, padding at the end. The
same lengths with room for 5: slots (0, 1) (1, 1) (1, 2) (4, 1) and one of padding.
"""

import torch
from torch import Tensor

from eyas.nn.staircase import slot_stairs
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots, make_slots


def chain_slots(rows: DraftRows, lengths: Tensor, capacities: tuple[int, ...]) -> Slots:
    """Slots [B, n + sum(capacities)] of chain lengths int64 [B, n]."""
    batch, n = lengths.shape
    device = lengths.device
    order = lengths.argsort(dim=1, descending=True, stable=True)
    sorted_lengths = lengths.gather(1, order)
    anchors = [torch.arange(n, device=device).expand(batch, n)]
    valid = [torch.ones_like(anchors[0], dtype=torch.bool)]
    depths = [torch.zeros(n, dtype=torch.int64, device=device)]
    for depth, size in enumerate(capacities, start=1):
        anchors.append(order[:, :size])
        valid.append(sorted_lengths[:, :size] >= depth)
        depths.append(torch.full((size,), depth, dtype=torch.int64, device=device))
    return make_slots(rows, torch.cat(anchors, 1), torch.cat(depths), torch.cat(valid, 1), capacities)


def rollout_slots(rows: DraftRows, lengths: Tensor, capacity: int) -> Slots:
    """Slots [B, n + capacity] of chain lengths int64 [B, n], none of whose rows adds up to more."""
    batch, n = lengths.shape
    ends = lengths.cumsum(1)
    place = torch.arange(capacity, device=lengths.device).expand(batch, capacity).contiguous()
    valid = place < ends[:, -1:]
    anchors = torch.searchsorted(ends, place, right=True).clamp(max=n - 1)
    depths = torch.where(valid, place - (ends - lengths).gather(1, anchors) + 1, 1)
    stairs = slot_stairs(rows.segments, anchors, depths, valid)
    index = torch.arange(n, device=lengths.device).expand(batch, n)
    slots = make_slots(
        rows,
        torch.cat((index, anchors), 1),
        torch.cat((torch.zeros_like(index), depths), 1),
        torch.cat((torch.ones_like(index, dtype=torch.bool), valid), 1),
    )
    return slots._replace(stairs=stairs)
