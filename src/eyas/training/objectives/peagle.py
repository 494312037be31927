"""P-EAGLE: all depths of all kept rollouts in one forward (arXiv 2602.01469).

    depth 0, anchor a    token x[a+1]    features[a]     RoPE a        -> guess x[a+2]
    depth k, anchor a    mask token      mask_hidden     RoPE a + k    -> guess x[a+2+k]

Which rollouts are kept is COD's choice (peagle/cod.py), drawn from (seed, step) alone. Rows of any length
fit when they are trained part by part (peagle/partition.py): `forward_part` is that part's forward.
"""

import torch
from torch import Tensor

from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.peagle.model import PEagleModel
from eyas.kernels.reference.slot_attention import Stairs
from eyas.nn.rollout import ChainContext
from eyas.nn.staircase import KeysValues, StaircaseContext
from eyas.training.peagle.cod import cap_anchors, capacities, chain_lengths, full_lengths
from eyas.training.peagle.layout import chain_slots, rollout_slots
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots


class PEagleObjective:
    """K depths with conditional drop; slots are [B, n + sum of capacities] (peagle/layout.py).

    `staircase` chooses the layout by anchor and attention by ranges, else by depth and by masks.
    """

    mean_over_first_depth = False

    def __init__(
        self,
        num_depths: int = 8,
        retention: float = 0.8,
        min_retention: float = 0.0,
        depth_weights: tuple[float, ...] | None = None,
        *,
        max_anchors: int | None = None,
        staircase: bool = False,
    ) -> None:
        self.num_depths = num_depths
        self.max_anchors, self.staircase = max_anchors, staircase
        self.retention, self.min_retention = retention, min_retention
        self.depth_weights = depth_weights or (1.0,) * num_depths

    def capacities(self, max_supervised: int, row_length: int) -> tuple[int, ...]:
        """Sizes of the blocks of depth 1 .. K - 1."""
        sizes = capacities(
            max_supervised,
            row_length,
            self.num_depths,
            retention=self.retention,
            min_retention=self.min_retention,
        )
        return sizes if self.max_anchors is None else tuple(min(size, self.max_anchors) for size in sizes)

    def slots(self, rows: DraftRows, *, seed: int, max_supervised: int) -> Slots:
        """Draw the rollouts; the same seed draws the same ones."""
        device = rows.tokens.device
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (self.num_depths - 1, *rows.tokens.shape)
        uniforms = torch.rand(shape, generator=generator, device=device)
        lengths = chain_lengths(
            rows.supervised,
            rows.segments,
            uniforms,
            retention=self.retention,
            min_retention=self.min_retention,
        )
        if self.max_anchors is not None:
            draw = torch.rand(rows.tokens.shape, generator=generator, device=device)
            lengths = cap_anchors(lengths, draw, self.max_anchors)
        return self._lay_out(rows, lengths, self.capacities(max_supervised, rows.tokens.shape[1]))

    def _lay_out(self, rows: DraftRows, lengths: Tensor, sizes: tuple[int, ...]) -> Slots:
        if self.staircase:
            return rollout_slots(rows, lengths, sum(sizes))
        return chain_slots(rows, lengths, sizes)

    def all_slots(self, rows: DraftRows) -> Slots:
        """Every rollout as deep as its document and the assistant's text go."""
        lengths = full_lengths(rows.supervised, rows.segments, self.num_depths)
        return self._lay_out(rows, lengths, (rows.tokens.shape[1],) * (self.num_depths - 1))

    def forward(self, model: Eagle3Model, rows: DraftRows, features: Tensor, slots: Slots) -> Tensor:
        """One forward over all slots: features [B, n, A * D] -> normed [B, M, D]."""
        n = rows.tokens.shape[1]
        positions = rows.positions.gather(1, slots.anchors) + slots.depths
        if slots.stairs is not None:
            return self.forward_part(model, rows.tokens, features, slots.depths, positions, slots.stairs)[0]
        context = ChainContext(slots.anchors, slots.segments, n, slots.blocks)
        normed, _ = model(*mask_inputs(model, rows.tokens, features, slots.depths), positions, context)
        out: Tensor = normed
        return out

    def forward_part(
        self,
        model: Eagle3Model,
        tokens: Tensor,
        features: Tensor | None,
        depths: Tensor,
        positions: Tensor,
        stairs: Stairs,
        past: list[KeysValues] | None = None,
        row_index: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Forward of r depth-0 rows and some rollouts: (normed [B, m, D], keys and values of the rows).

        tokens [B, r] and features [B, r, A * D] (None for r = 0); depths and RoPE positions [B, m] and stairs
        of all slots, rows first. past and row_index [r]: see StaircaseContext.
        """
        context = StaircaseContext(stairs, tokens.shape[1], past, row_index)
        normed, _ = model(*mask_inputs(model, tokens, features, depths), positions, context)
        return normed, context.made

    def bound(self, num_supervised: list[int]) -> int:
        """Supervised rows at depth 0, and what COD may keep of them deeper down."""
        return sum(count + sum(self.capacities(count, row_length=count)) for count in num_supervised if count)


def mask_inputs(
    model: Eagle3Model, tokens: Tensor, features: Tensor | None, depths: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings and hidden states [B, m, D]: those of r rows, then the mask's for the other slots.

    depths int64 [B, m] or [m] of all slots.
    """
    assert isinstance(model, PEagleModel)
    batch, num_rows = tokens.shape
    shape = (batch, depths.shape[-1] - num_rows, -1)
    masked = model.masked_states(depths[..., num_rows:].expand(shape[:2]))
    if features is None:
        return model.mask_embedding.to(masked.dtype).expand(shape), masked
    fused, embedded = model.fuse(features), model.embed(tokens)
    mask = model.mask_embedding.to(embedded.dtype).expand(shape)
    return torch.cat((embedded, mask), 1), torch.cat((fused, masked.to(fused.dtype)), 1)
