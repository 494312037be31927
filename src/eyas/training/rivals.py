"""P-EAGLE's slots under the attention of other trainers, to be timed beside the staircase (speed.py).

    dense   a bool mask of M x M slots, scaled-dot-product attention
    flex    FlexAttention over a block mask; slots ordered by depth, anchors ascending within a depth, as in
            the public P-EAGLE trainers

Same slots, same model, same loss: only order and attention differ.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.drafters.eagle3.model import Eagle3Model
from eyas.kernels.reference.slot_attention import slot_mask
from eyas.nn.attention import AttentionContext
from eyas.nn.packed import SlotContext
from eyas.training.objectives.peagle import PEagleObjective, mask_inputs
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots


class DensePEagle(PEagleObjective):
    """One mask of all slots by all slots."""

    def slots(self, rows: DraftRows, *, seed: int, max_supervised: int) -> Slots:
        """The same draw, ordered by depth."""
        drawn = super().slots(rows, seed=seed, max_supervised=max_supervised)
        order = drawn.depths.expand_as(drawn.anchors).argsort(dim=1, stable=True)
        anchors, depths, segments, supervised = (field.gather(1, order) for field in drawn[:4])
        return Slots(anchors, depths, segments, supervised)

    def context(self, slots: Slots) -> AttentionContext:
        """The mask, made anew for every batch."""
        mask = slot_mask(
            slots.anchors, slots.depths, slots.segments, slots.anchors, slots.depths, slots.segments
        )
        return SlotContext(mask)

    def forward(self, model: Eagle3Model, rows: DraftRows, features: Tensor, slots: Slots) -> Tensor:
        """One forward over all slots."""
        positions = rows.positions.gather(1, slots.anchors) + slots.depths
        inputs = mask_inputs(model, rows.tokens, features, slots.depths)
        normed: Tensor = model(*inputs, positions, self.context(slots))[0]
        return normed


@dataclass
class FlexContext:
    """FlexAttention with a block mask of all slots."""

    block_mask: Any

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attend slots [B, M, heads, dh]."""
        from torch.nn.attention.flex_attention import flex_attention

        del layer, window
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        out = flex_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            block_mask=self.block_mask,
            scale=scale,
            enable_gqa=queries.shape[2] != keys.shape[2],
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)


def _rule(anchors: Tensor, depths: Tensor, segments: Tensor) -> Any:
    """The slot rule as FlexAttention asks for it; made once, for code compiled with it."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del b, h
        context = (depths[k] == 0) & (anchors[k] <= anchors[q])
        own = (anchors[k] == anchors[q]) & (depths[k] <= depths[q])
        return (segments[q] == segments[k]) & (context | own)

    return rule


class FlexPEagle(DensePEagle):
    """The rule as a predicate over index vectors; blocks that hold nothing are skipped."""

    block_mask: Any = None
    vectors: tuple[Tensor, Tensor, Tensor] | None = None
    rule: Any = None

    def slots(self, rows: DraftRows, *, seed: int, max_supervised: int) -> Slots:
        """Draw slots and make their block mask.

        Its predicate reads buffers that stay the same tensors, so that compiled code stays valid.
        """
        from torch.nn.attention.flex_attention import create_block_mask

        slots = super().slots(rows, seed=seed, max_supervised=max_supervised)
        found = (slots.anchors[0], slots.depths[0], slots.segments[0].long())
        if self.vectors is None:
            self.vectors = tuple(x.clone() for x in found)  # type: ignore[assignment]
            self.rule = _rule(*self.vectors)  # type: ignore[misc]
        assert self.vectors is not None
        for kept, new in zip(self.vectors, found, strict=True):
            kept.copy_(new)
        size = slots.anchors.shape[1]
        made = create_block_mask(
            self.rule, None, None, size, size, device=str(slots.anchors.device), _compile=True
        )
        if self.block_mask is None:
            self.block_mask = made
            return slots
        # The forward was compiled with the first mask: give it the new one's blocks.
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks",
                     "q_indices", "full_q_num_blocks", "full_q_indices"):  # fmt: skip
            kept, new = getattr(self.block_mask, name), getattr(made, name)
            if kept is not None and kept.shape == new.shape:
                kept.copy_(new)
        return slots

    def context(self, slots: Slots) -> AttentionContext:
        """The block mask that `slots` made."""
        del slots
        return FlexContext(self.block_mask)
