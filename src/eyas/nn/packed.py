"""Attention contexts without a cache: whole sequences and training slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.reference.slot_attention import causal_segment_mask, slot_attention, slot_mask


@dataclass(slots=True)
class PackedContext:
    """Whole rows of packed documents [N, n, heads, dh]: causal within each document.

    Build it with `PackedContext.of(segments)`; segments int [N, n], -1 is padding.
    """

    mask: Tensor
    positions: Tensor

    @classmethod
    def of(cls, segments: Tensor, positions: Tensor | None = None) -> "PackedContext":
        """Context of packed documents; positions [N, n] are needed only for sliding windows."""
        if positions is None:
            positions = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
        return cls(causal_segment_mask(segments), positions)

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
        """Causal attention within documents, optionally over the last `window` positions."""
        del layer
        mask = self.mask
        if window is not None:
            mask = mask & (self.positions.unsqueeze(-2) > self.positions.unsqueeze(-1) - window)
        return slot_attention(queries, keys, values, mask, scale=scale)


@dataclass(slots=True)
class SlotContext:
    """Training slots [N, M, heads, dh] under the slot rule (anchor, depth, segment: int [N, M])."""

    mask: Tensor

    @classmethod
    def of(cls, anchors: Tensor, depths: Tensor, segments: Tensor) -> "SlotContext":
        """Context in which every slot of the tensor is query and key."""
        return cls(slot_mask(anchors, depths, segments, anchors, depths, segments))

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
        """Attention under the slot rule; windows are not used by any drafter that trains here."""
        del layer
        assert window is None, "training slots have no sliding window"
        return slot_attention(queries, keys, values, self.mask, scale=scale)
