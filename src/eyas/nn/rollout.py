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
    *,
    scale: float,
) -> Tensor:
    """One softmax over shared context and own keys: queries [N, M, H, dh] -> [N, M, H, dh].

    context_keys, context_values [N, n, KV, dh] with context_mask bool [N, M, n]; own_keys, own_values
    [N, M, J, KV, dh], J >= 1, all of which are seen.
    """
    N, M, H, dh = queries.shape
    KV = context_keys.shape[-2]
    G = H // KV
    hidden = torch.finfo(queries.dtype).min
    # Grouped heads become rows of one matrix product per KV head.
    folded = queries.view(N, M, KV, G, dh).permute(0, 2, 1, 3, 4)  # [N, KV, M, G, dh]
    scores = folded.reshape(N, KV, M * G, dh) @ context_keys.permute(0, 2, 3, 1)
    scores = (scores.view(N, KV, M, G, -1) * scale).masked_fill(~context_mask[:, None, :, None, :], hidden)
    own = (folded.unsqueeze(4) * own_keys.permute(0, 3, 1, 2, 4).unsqueeze(3)).sum(-1)  # [N, KV, M, G, J]
    own = own * scale
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
    masks: tuple[Tensor, tuple[Tensor, ...]] | None = None

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
        """Attend all slots [N, M, heads, dh] under the slot rule, block by block.

        Slot c of the block of depth k owns slot c of every block up to it: capacities (3, 2) and blocks
        [a1 b1 c1] [a2 b2] give a2 the own keys [a1 a2] and b2 [b1 b2].
        """
        del layer
        assert window is None, "training slots have no sliding window"
        if self.masks is None:
            self.masks = self._build_masks()
        causal, block_masks = self.masks
        sizes = [self.row_length, *self.capacities]
        (first, *q_blocks), (context_keys, *k_blocks), (context_values, *v_blocks) = (
            torch.split(x, sizes, dim=1) for x in (queries, keys, values)
        )
        out = [slot_attention(first, context_keys, context_values, causal, scale=scale)]
        for depth, (block, mask) in enumerate(zip(q_blocks, block_masks, strict=True), start=1):
            size = block.shape[1]
            if size == 0:
                continue
            own_keys = torch.stack([x[:, :size] for x in k_blocks[:depth]], dim=2)
            own_values = torch.stack([x[:, :size] for x in v_blocks[:depth]], dim=2)
            rolled = rollout_attention(
                block, context_keys, context_values, own_keys, own_values, mask, scale=scale
            )
            out.append(rolled)
        return torch.cat(out, dim=1)

    def _build_masks(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Causal mask [N, n, n] of depth 0, and for each block which context its slots see [N, C_k, n]."""
        n = self.row_length
        segments, anchors = self.segments[:, :n], self.anchors[:, :n]
        rolled_anchors, rolled_segments = self.anchors[:, n:], self.segments[:, n:]
        context_mask = (anchors.unsqueeze(1) <= rolled_anchors.unsqueeze(2)) & (
            segments.unsqueeze(1) == rolled_segments.unsqueeze(2)
        )
        return _causal(segments), torch.split(context_mask, list(self.capacities), dim=1)


def _causal(segments: Tensor) -> Tensor:
    """Bool [N, n, n] of depth-0 slots: causal within a segment."""
    index = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    zero = torch.zeros_like(segments)
    return slot_mask(index, zero, segments, index, zero, segments)
