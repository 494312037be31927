"""P-EAGLE: all depths of all kept rollouts in one forward (arXiv 2602.01469).

    depth 0, anchor a    token x[a+1]    features[a]     RoPE a        -> guess x[a+2]
    depth k, anchor a    mask token      mask_hidden     RoPE a + k    -> guess x[a+2+k]

Which rollouts are kept is COD's choice (peagle/cod.py), drawn from (seed, step) alone.
"""

import torch
from torch import Tensor

from eyas.drafters.eagle3.model import Eagle3Model
from eyas.drafters.peagle.model import PEagleModel
from eyas.nn.rollout import ChainContext
from eyas.training.peagle.cod import capacities, chain_lengths, full_lengths
from eyas.training.peagle.layout import chain_slots
from eyas.training.rows import DraftRows
from eyas.training.slots import Slots


class PEagleObjective:
    """K depths with conditional drop; slots are [B, n + sum of capacities] (peagle/layout.py)."""

    mean_over_first_depth = False

    def __init__(
        self,
        num_depths: int = 8,
        retention: float = 0.8,
        min_retention: float = 0.0,
        depth_weights: tuple[float, ...] | None = None,
    ) -> None:
        self.num_depths = num_depths
        self.retention, self.min_retention = retention, min_retention
        self.depth_weights = depth_weights or (1.0,) * num_depths

    def capacities(self, max_supervised: int, row_length: int) -> tuple[int, ...]:
        """Sizes of the blocks of depth 1 .. K - 1."""
        return capacities(
            max_supervised,
            row_length,
            self.num_depths,
            retention=self.retention,
            min_retention=self.min_retention,
        )

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
        return chain_slots(rows, lengths, self.capacities(max_supervised, rows.tokens.shape[1]))

    def all_slots(self, rows: DraftRows) -> Slots:
        """Every rollout as deep as its document and the assistant's text go."""
        lengths = full_lengths(rows.supervised, rows.segments, self.num_depths)
        return chain_slots(rows, lengths, (rows.tokens.shape[1],) * (self.num_depths - 1))

    def forward(self, model: Eagle3Model, rows: DraftRows, features: Tensor, slots: Slots) -> Tensor:
        """One forward over all slots: features [B, n, A * D] -> normed [B, M, D]."""
        assert isinstance(model, PEagleModel)
        batch, n = rows.tokens.shape
        num_masks = slots.depths.numel() - n
        fused = model.fuse(features)
        shared = model.fuse(model.mask_hidden).to(fused.dtype).expand(batch, num_masks, -1)
        embedded = model.embed(rows.tokens)
        mask = model.mask_embedding.to(embedded.dtype).expand(batch, num_masks, -1)
        context = ChainContext(slots.anchors, slots.segments, n, slots.blocks)
        positions = rows.positions.gather(1, slots.anchors) + slots.depths
        normed, _ = model(torch.cat((embedded, mask), 1), torch.cat((fused, shared), 1), positions, context)
        out: Tensor = normed
        return out

    def bound(self, num_supervised: list[int]) -> int:
        """Supervised rows at depth 0, and what COD may keep of them deeper down."""
        return sum(count + sum(self.capacities(count, row_length=count)) for count in num_supervised if count)
