"""Training attention over depth-0 keys plus a slot's own rollout; no M x M mask.

The slot rule (kernels/reference/slot_attention.py) lets a slot of depth k see depth-0 keys up to its anchor
and its own rollout, nothing else. So a query needs n columns of real context and at most K - 1 columns of its
own, and one softmax over both:

    columns of slot (anchor 2, depth 2):   k(0,0) k(1,0) k(2,0) | k(2,1) k(2,2)

TTTContext serves EAGLE-3, whose steps arrive one after the other (the diagonal trick of its paper),
and ChainContext P-EAGLE, whose slots arrive together in the layout of training/peagle/layout.py.

N rows of the batch, n tokens of a row, M slots, J own keys, H heads, KV key heads, dh head width.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.kernels.reference.slot_attention import slot_attention, slot_mask


def rollout_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    context_mask: Tensor,
    own_mask: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """One softmax over shared context and own keys: queries [N, M, H, dh] -> [N, M, H, dh].

    context_keys, context_values [N, n, KV, dh] with context_mask bool [N, M, n]; own_keys, own_values
    [N, M, J, KV, dh] with own_mask bool [M, J] (None: all seen). Every query must see one own key at least.
    """
    N, M, H, dh = queries.shape
    KV = context_keys.shape[-2]
    G = H // KV
    hidden = torch.finfo(queries.dtype).min
    # Grouped heads become rows of one matrix product per KV head.
    folded = queries.view(N, M, KV, G, dh).permute(0, 2, 1, 3, 4)  # [N, KV, M, G, dh]
    scores = folded.reshape(N, KV, M * G, dh) @ context_keys.permute(0, 2, 3, 1)
    scores = (scores.view(N, KV, M, G, -1) * scale).masked_fill(~context_mask[:, None, :, None, :], hidden)
    own = (folded.unsqueeze(4) * own_keys.permute(0, 3, 1, 2, 4).unsqueeze(3)).sum(
        -1
    ) * scale  # [N, KV, M, G, J]
    if own_mask is not None:
        own = own.masked_fill(~own_mask[:, None, :], hidden)
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    scores, own = scores.to(wide), own.to(wide)
    # Shifting both parts by one maximum changes nothing, so no gradient needs to pass through it.
    top = torch.maximum(scores.amax(-1), own.amax(-1)).detach().unsqueeze(-1)
    weights, own_weights = (scores - top).exp(), (own - top).exp()
    total = weights.sum(-1, keepdim=True) + own_weights.sum(-1, keepdim=True)
    mixed = weights.to(queries.dtype).reshape(N, KV, M * G, -1) @ context_values.transpose(1, 2)
    mixed_own = (own_weights.unsqueeze(-1) * own_values.permute(0, 3, 1, 2, 4).unsqueeze(3)).sum(-2)
    out = (mixed.view(N, KV, M, G, dh).to(wide) + mixed_own) / total
    return out.to(queries.dtype).permute(0, 2, 1, 3, 4).reshape(N, M, H, dh)


@dataclass
class TTTContext:
    """EAGLE-3's training-time test: the s-th forward through it is step s of every rollout at once.

    Row t of step s is slot (anchor t, depth s). It attends to step-0 keys up to t (causal block) and to the
    keys that row t itself made at steps 1 .. s (the diagonals). `segments` int [N, n]; -1 sees only -1.
    """

    segments: Tensor
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)
    mask: Tensor | None = None

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
        """Attend step s = number of earlier calls for this layer; tensors are [N, n, heads, dh]."""
        assert window is None, "training slots have no sliding window"
        if self.mask is None:
            self.mask = _causal(self.segments)
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = [keys], [values]
            return slot_attention(queries, keys, values, self.mask, scale=scale)
        self.keys[layer].append(keys)
        self.values[layer].append(values)
        context_keys, *own_keys = self.keys[layer]
        context_values, *own_values = self.values[layer]
        return rollout_attention(
            queries,
            context_keys,
            context_values,
            torch.stack(own_keys, dim=2),
            torch.stack(own_values, dim=2),
            self.mask,
            None,
            scale=scale,
        )


@dataclass
class ChainContext:
    """P-EAGLE's slots laid out as [depth 0: n][depth 1: C_1][depth 2: C_2]..., C_1 >= C_2 >= ...

    Slot c of every depth >= 1 block belongs to the same rollout, so own keys are slices, not gathers. Padding
    slots have segment -1. anchors and segments are int [N, M]; `capacities` is (C_1, ..., C_{K-1}).
    """

    anchors: Tensor
    segments: Tensor
    row_length: int
    capacities: tuple[int, ...]
    masks: tuple[Tensor, Tensor, Tensor] | None = None

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
        """Attend all slots [N, M, heads, dh] under the slot rule."""
        del layer
        assert window is None, "training slots have no sliding window"
        n = self.row_length
        if self.masks is None:
            self.masks = self._build_masks()
        causal, context_mask, own_mask = self.masks
        context_keys, context_values = keys[:, :n], values[:, :n]
        out = slot_attention(queries[:, :n], context_keys, context_values, causal, scale=scale)
        if not sum(self.capacities):
            return out
        rolled = rollout_attention(
            queries[:, n:],
            context_keys,
            context_values,
            self._own(keys[:, n:]),
            self._own(values[:, n:]),
            context_mask,
            own_mask,
            scale=scale,
        )
        return torch.cat((out, rolled), dim=1)

    def _own(self, x: Tensor) -> Tensor:
        """Rows of depth >= 1 blocks [N, M - n, KV, dh] -> own rows of each slot [N, M - n, K - 1, KV, dh].

        Capacities (3, 2), rows [a1 b1 c1 a2 b2] -> column depth 1: [a1 b1 c1 a1 b1], depth 2: [0 0 0 a2 b2].
        """
        blocks = torch.split(x, list(self.capacities), dim=1)
        columns = []
        for depth, block in enumerate(blocks):
            parts = [
                block[:, :size] if query_depth >= depth else torch.zeros_like(x[:, :size])
                for query_depth, size in enumerate(self.capacities)
            ]
            columns.append(torch.cat(parts, dim=1))
        return torch.stack(columns, dim=2)

    def _build_masks(self) -> tuple[Tensor, Tensor, Tensor]:
        n, device = self.row_length, self.anchors.device
        segments, anchors = self.segments[:, :n], self.anchors[:, :n]
        rolled_anchors, rolled_segments = self.anchors[:, n:], self.segments[:, n:]
        context_mask = (anchors.unsqueeze(1) <= rolled_anchors.unsqueeze(2)) & (
            segments.unsqueeze(1) == rolled_segments.unsqueeze(2)
        )
        blocks = torch.arange(len(self.capacities), device=device)
        depths = [torch.full((size,), depth, device=device) for depth, size in enumerate(self.capacities)]
        own_mask = torch.cat((blocks[:0], *depths))[:, None] >= blocks
        return _causal(segments), context_mask, own_mask


def _causal(segments: Tensor) -> Tensor:
    """Bool [N, n, n] of depth-0 slots: causal within a segment."""
    index = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    zero = torch.zeros_like(segments)
    return slot_mask(index, zero, segments, index, zero, segments)
