"""Training attention without a mask matrix, for long rows: the same slot rule as nn/rollout.py, by ranges.

Slots are depth-0 rows in order, then rollouts sorted by anchor, a rollout's slots side by side
(training/peagle/layout.py). Every query then reads one range of context keys and one of its own rollout's
keys (kernels/reference/slot_attention.py, Stairs), and the kernel walks over tiles of both.

B rows of the batch, n tokens of a row, M slots, H heads, KV key heads, G = H / KV, dh head width.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.reference.slot_attention import Stairs, make_stairs
from eyas.kernels.slots import stairs_attention

KeysValues = tuple[Tensor, Tensor]


def row_ranges(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that each row of packed documents sees, first .. last - 1: int64 [B, n] each.

    segments int [B, n], -1 sees nothing: 0 0 -1 1 1 -> first 0 0 2 3 3, last 1 2 2 4 5.
    """
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    changed = torch.ones_like(segments, dtype=torch.bool)
    changed[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = torch.where(changed, index, 0).cummax(1).values
    alone = segments < 0
    return torch.where(alone, index, first), torch.where(alone, index, index + 1)


def row_stairs(segments: Tensor) -> Stairs:
    """Stairs of depth-0 rows alone: causal attention within documents."""
    none = torch.zeros(segments.shape[0], 0, dtype=torch.int32, device=segments.device)
    return make_stairs(*row_ranges(segments), none, segments.shape[1])


def slot_stairs(segments: Tensor, anchors: Tensor, depths: Tensor, valid: Tensor) -> Stairs:
    """Stairs of all rows [B, n] and then rollout slots [B, J]: anchors, depths >= 1, valid.

    Rollouts are sorted by anchor and each is whole; what is not valid stands at the end.
    """
    n = segments.shape[1]
    first, last = row_ranges(segments)
    rolled_first = torch.where(valid, first.gather(1, anchors), n)
    rolled_last = torch.where(valid, last.gather(1, anchors), n)
    place = torch.arange(anchors.shape[1], device=anchors.device)
    own = torch.where(valid, place - depths + 1, place + 1)
    return make_stairs(torch.cat((first, rolled_first), 1), torch.cat((last, rolled_last), 1), own, n)


@dataclass
class StaircaseContext:
    """P-EAGLE's slots: `num_rows` depth-0 rows, then rollouts, under `stairs`.

    Without `past` the context keys are those of the rows themselves. With it they are past[layer], [B, n,
    KV, dh] each, in which the rows of this forward take the places `row_index` [num_rows].
    """

    stairs: Stairs
    num_rows: int
    past: list[KeysValues] | None = None
    row_index: Tensor | None = None
    made: list[KeysValues] = field(default_factory=list)
    """Keys and values of the rows, one entry a layer, as they were attended to."""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend slots [B, M, heads, dh]; layers come in order."""
        assert window is None, "training slots have no sliding window"
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        rows = self.num_rows
        context = (keys[:, :rows], values[:, :rows])
        self.made.append(context)
        if self.past is not None:
            key, value = self.past[layer]
            if rows:
                assert self.row_index is not None
                key = key.index_copy(1, self.row_index, context[0])
                value = value.index_copy(1, self.row_index, context[1])
            context = (key, value)
        out, _ = stairs_attention(
            queries, *context, keys[:, rows:], values[:, rows:], self.stairs, scale=scale
        )
        return out


@dataclass
class StaircaseTTTContext:
    """EAGLE-3's training-time test: TTTContext of nn/rollout.py without its n x n scores.

    Row t of step s sees step-0 keys up to t (the kernel) and the keys that row t made at steps 1 .. s, whose
    s scores a row are merged with the kernel's softmax exactly (merge_own).
    """

    stairs: Stairs
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend step s = number of earlier calls for this layer; tensors are [B, n, heads, dh]."""
        assert window is None, "training slots have no sliding window"
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        self.keys.setdefault(layer, []).append(keys)
        self.values.setdefault(layer, []).append(values)
        context_keys, *own_keys = self.keys[layer]
        context_values, *own_values = self.values[layer]
        none = context_keys[:, :0]
        out, lse = stairs_attention(
            queries, context_keys, context_values, none, none, self.stairs, scale=scale
        )
        return merge_own(out, lse, queries, own_keys, own_values, scale=scale)


def merge_own(
    out: Tensor, lse: Tensor, queries: Tensor, keys: list[Tensor], values: list[Tensor], *, scale: float
) -> Tensor:
    """Add one own key a row and step to a softmax that is already made: out, queries [B, n, H, dh].

    lse [B, n, H] is the logarithm of the softmax's denominator; keys and values are s tensors of
    [B, n, KV, dh]. Scores 2 and 3 in the softmax, lse = log(e^2 + e^3), and own score 1 weigh `out` by
    (e^2 + e^3) / (e + e^2 + e^3) and the own value by the rest.
    """
    if not keys:
        return out
    B, n, H, dh = out.shape
    KV = keys[0].shape[2]
    wide = lse.dtype
    folded = queries.to(wide).view(B, n, KV, H // KV, dh)
    own = [(folded * key.to(wide).unsqueeze(3)).sum(-1).view(B, n, H) * scale for key in keys]
    # Shifting all parts by one maximum changes nothing, so no gradient needs to pass through it.
    top = torch.stack((lse, *own)).amax(0).detach()
    weight = (lse - top).exp()
    total, mixed = weight, weight.unsqueeze(-1) * out.to(wide)
    for score, value in zip(own, values, strict=True):
        weight = (score - top).exp()
        total = total + weight
        spread = weight.view(B, n, KV, H // KV, 1) * value.to(wide).unsqueeze(3)
        mixed = mixed + spread.view(B, n, H, dh)
    return (mixed / total.unsqueeze(-1)).to(out.dtype)
