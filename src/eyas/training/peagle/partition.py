"""Train one sequence part by part (P-EAGLE, section 3.3): memory falls with S, gradients stay the flat run's.

A slot sees rows up to its anchor and its own rollout, so a part that holds whole rollouts and can read the
keys and values of all rows before them computes exactly what the flat forward would. Slots are drawn once,
before they are cut; every slot's loss is taken in exactly one part, over the one normaliser; gradients of the
parts add up. Three ways, the same gradients:

    shared     rows (depth 0) run once and keep their graph; rollouts follow in S parts that read the rows'
               keys and values; what they send back into those is summed, and the rows go backward once.
               Nothing is computed twice. Memory: all rows, one part of the rollouts.
    replayed   as shared, but the rows too run in S parts and are run again, last part first, when their
               gradients are known. One more forward of the rows. Memory: keys and values of all rows, one
               part of everything else.
    prefix     the paper's: part s holds the rollouts whose first slot lies in [B_s, B_s+1) and recomputes all
               rows before B_s+1, boundaries B_s = s n / S. About (S + 1) / 2 times the rows' work.

Rollout slots of the first two are cut where S equal shares end, moved to the next rollout's start:

    own starts  0 0 0 3 3 5 5 5   (three rollouts), S = 2, share 4  ->  slots 0 .. 4 and 5 .. 7
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eyas.kernels.reference.slot_attention import make_stairs
from eyas.nn.staircase import KeysValues
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots

Mode = Literal["shared", "replayed", "prefix"]


@dataclass(frozen=True, slots=True)
class Partition:
    """How a sequence is cut."""

    num_parts: int = 1
    mode: Mode = "shared"


class Part(NamedTuple):
    """Rows begin .. end - 1 and some whole rollouts, as one forward takes them."""

    begin: int
    end: int
    slots: Slots
    """Those of the part, rows first; supervised only where the part takes the loss."""
    places: Tensor
    """Their places among all slots, int64 [B, m]; the number of all slots where a place is empty."""


PartForward = Callable[..., tuple[Tensor, list[KeysValues]]]
"""Drafter over one part, called as PEagleObjective.forward_part after its model."""
Lose = Callable[[Tensor, Slots, int], Tensor]
"""Loss of normed [B, m, D] over slots [B, m], of which at most so many are supervised."""


def take(
    slots: Slots,
    row_length: int,
    *,
    rows: tuple[int, int],
    owned_from: int,
    start: Tensor,
    stop: Tensor,
    size: int,
    num_context: int,
) -> Part:
    """Cut rows begin .. end - 1 and rollout slots start[b] .. stop[b] - 1 (whole rollouts) out of all slots.

    At most `size` rollout slots of any b, and they see rows below num_context. Rows below `owned_from` are
    context: their loss is another part's.
    """
    assert slots.stairs is not None
    n, (begin, end) = row_length, rows
    batch, device = slots.anchors.shape[0], slots.anchors.device
    row = torch.arange(begin, end, device=device).expand(batch, -1)
    place = start.unsqueeze(1) + torch.arange(size, device=device)
    inside = place < stop.unsqueeze(1)
    place = place.clamp(max=slots.anchors.shape[1] - n - 1)
    index = torch.cat((row, n + place), 1)
    owned = torch.cat((row >= owned_from, inside), 1)
    there = torch.cat((torch.ones_like(row, dtype=torch.bool), inside), 1)
    segments = torch.where(there, slots.segments.gather(1, index), -1)
    stairs = slots.stairs
    # What is not of this part stands at its end, and sees nothing: ranges must never fall.
    first, last = (
        torch.cat((x[:, begin:end], torch.where(inside, x[:, n:].gather(1, place), num_context)), 1)
        for x in (stairs.first, stairs.last)
    )
    own = torch.where(
        inside, stairs.own.gather(1, place) - start.unsqueeze(1), torch.arange(1, size + 1, device=device)
    )
    cut = Slots(
        slots.anchors.gather(1, index),
        slots.depths.expand_as(slots.anchors).gather(1, index),
        segments,
        slots.supervised.gather(1, index) & owned,
        stairs=make_stairs(first, last, own, num_context),
    )
    return Part(begin, end, cut, torch.where(there, index, slots.anchors.shape[1]))


def row_part(slots: Slots, row_length: int, begin: int, end: int) -> Part:
    """Rows begin .. end - 1 alone."""
    none = torch.zeros(slots.anchors.shape[0], dtype=torch.int64, device=slots.anchors.device)
    return take(
        slots,
        row_length,
        rows=(begin, end),
        owned_from=begin,
        start=none,
        stop=none,
        size=0,
        num_context=row_length,
    )


def rollout_starts(slots: Slots, num_parts: int, num_depths: int) -> tuple[Tensor, int]:
    """First rollout slot of each of S parts and the end, int64 [B, S + 1], and the size of the largest part.

    Nothing is read back: a part has at most its share and the rest of one rollout.
    """
    assert slots.stairs is not None
    own = slots.stairs.own.long()
    count = own.shape[1]
    share = max(-(-count // num_parts), 1)
    place = torch.arange(count, device=own.device)
    begins = own >= place  # of a rollout; padding's `own` is its place + 1
    wanted = torch.arange(num_parts + 1, device=own.device) * share
    window = wanted.unsqueeze(1) + torch.arange(max(num_depths - 1, 1), device=own.device)
    flags = begins[:, window.clamp(max=count - 1)] | (window >= count)
    starts = wanted + flags.to(torch.int8).argmax(-1)
    return starts.clamp(max=count), min(share + max(num_depths - 2, 0), count)


def rollout_parts(slots: Slots, row_length: int, num_parts: int, num_depths: int) -> Iterator[Part]:
    """Rollouts in S parts without rows."""
    count = slots.anchors.shape[1] - row_length
    if not count:
        return
    starts, size = rollout_starts(slots, num_parts, num_depths)
    for part in range(min(num_parts, count)):
        yield take(
            slots,
            row_length,
            rows=(0, 0),
            owned_from=0,
            start=starts[:, part],
            stop=starts[:, part + 1],
            size=size,
            num_context=row_length,
        )


def prefix_parts(slots: Slots, row_length: int, num_parts: int) -> Iterator[Part]:
    """The paper's parts: all rows below B_s+1, and the rollouts whose first slot is in [B_s, B_s+1).

    Sizes are read back, once a batch.
    """
    n = row_length
    bounds = [part * n // num_parts for part in range(num_parts + 1)]
    rolled = slots.segments[:, n:] >= 0
    # Position of a rollout's first slot, which is row anchor + 1; padding lies past the end.
    first = torch.where(rolled, slots.anchors[:, n:] + 1, n).contiguous()
    edges = torch.tensor(bounds, device=first.device).expand(first.shape[0], -1).contiguous()
    starts = torch.searchsorted(first, edges)
    size = int((starts[:, 1:] - starts[:, :-1]).amax())
    size = min(-(-size // 64) * 64, first.shape[1])
    for part in range(num_parts):
        yield take(
            slots,
            n,
            rows=(0, bounds[part + 1]),
            owned_from=bounds[part],
            start=starts[:, part],
            stop=starts[:, part + 1],
            size=size,
            num_context=bounds[part + 1],
        )


class _Past:
    """Keys and values of all rows as leaves, and the sum of what the parts send back into them."""

    def __init__(self, made: list[KeysValues]) -> None:
        self.leaves = [
            (key.detach().requires_grad_(), value.detach().requires_grad_()) for key, value in made
        ]
        # Summed in float32 at least: a bfloat16 sum over many parts would drift.
        self.sums = [
            torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
            for pair in self.leaves
            for x in pair
        ]

    def collect(self) -> None:
        """Move the leaves' gradients into the sums."""
        for leaf, total in zip((x for pair in self.leaves for x in pair), self.sums, strict=True):
            if leaf.grad is not None:
                total.add_(leaf.grad)
                leaf.grad = None

    def backward(self, loss: Tensor, made: list[KeysValues], begin: int, end: int) -> None:
        """Send the sums of rows begin .. end - 1 and the rows' own loss through the rows' graph."""
        outputs = [x for pair in made for x in pair]
        sums = [total[:, begin:end].to(x.dtype) for total, x in zip(self.sums, outputs, strict=True)]
        torch.autograd.backward([loss, *outputs], [None, *sums])


@torch.no_grad()
def draft_parts(
    partition: Partition,
    rows: DraftRows,
    features: Tensor,
    slots: Slots,
    *,
    num_depths: int,
    forward: PartForward,
) -> Tensor:
    """What the flat forward gives, normed [B, M, D], rollouts in parts and no gradients."""
    n = rows.tokens.shape[1]
    part = row_part(slots, n, 0, n)
    found, past = forward(
        rows.tokens, features, part.slots.depths, rows.positions, part.slots.stairs, None, None
    )
    out = found.new_zeros(found.shape[0], slots.anchors.shape[1] + 1, found.shape[2])
    out[:, :n] = found
    for part in rollout_parts(slots, n, partition.num_parts, num_depths):
        positions = rows.positions.gather(1, part.slots.anchors) + part.slots.depths
        found, _ = forward(
            rows.tokens[:, :0], None, part.slots.depths, positions, part.slots.stairs, past, None
        )
        out.scatter_(1, part.places.unsqueeze(-1).expand_as(found), found)
    return out[:, :-1]


def train_parts(
    partition: Partition,
    rows: DraftRows,
    features: Tensor,
    slots: Slots,
    *,
    num_depths: int,
    bound: int,
    forward: PartForward,
    lose: Lose,
    empty_past: Callable[[], list[KeysValues]],
) -> None:
    """Forward and backward of all parts; gradients add up in the model.

    features [B, n, A * D] are shifted. `bound` is a bound of all supervised slots of the batch, known on the
    host. `empty_past` makes keys and values [B, n, KV, dh] of every layer.
    """
    n, parts = rows.tokens.shape[1], partition.num_parts

    def run(
        part: Part, past: list[KeysValues] | None, *, whole: bool = False
    ) -> tuple[Tensor, list[KeysValues]]:
        assert part.slots.stairs is not None
        positions = rows.positions.gather(1, part.slots.anchors) + part.slots.depths
        begin, end = part.begin, part.end
        index = None if whole or begin == end else torch.arange(begin, end, device=positions.device)
        inputs = features[:, begin:end] if end > begin else None
        return forward(
            rows.tokens[:, begin:end], inputs, part.slots.depths, positions, part.slots.stairs, past, index
        )

    def loss_of(part: Part, normed: Tensor) -> Tensor:
        return lose(normed, part.slots, min(bound, part.slots.anchors.numel()))

    if partition.mode == "prefix":
        for part in prefix_parts(slots, n, parts):
            normed, _ = run(part, None, whole=True)
            torch.autograd.backward(loss_of(part, normed))
        return
    if partition.mode == "shared":
        cuts = [row_part(slots, n, 0, n)]
        normed, made = run(cuts[0], None, whole=True)
        pending = loss_of(cuts[0], normed)
        past = _Past(made)
    else:
        cuts = [row_part(slots, n, s * n // parts, (s + 1) * n // parts) for s in range(min(parts, n))]
        buffers = empty_past()
        with torch.no_grad():
            for part in cuts:
                for old, new in zip(buffers, run(part, buffers)[1], strict=True):
                    old[0][:, part.begin : part.end] = new[0]
                    old[1][:, part.begin : part.end] = new[1]
        past = _Past(buffers)
    for part in rollout_parts(slots, n, parts, num_depths):
        normed, _ = run(part, past.leaves)
        torch.autograd.backward(loss_of(part, normed))
        past.collect()
    if partition.mode == "shared":
        past.backward(pending, made, 0, n)
        return
    for part in reversed(cuts):
        normed, made = run(part, past.leaves)
        past.backward(loss_of(part, normed), made, part.begin, part.end)
        past.collect()
