"""Acceptance by depth on held-out rows, as greedy decoding would see it, and the AL that it implies.

An anchor reaches depth k if at every depth before it the drafter's argmax was the target's, and the data
went the same way (elsewhere the teacher speaks of another text). Of the anchors that reach depth k,
`acceptance[k]` is the share whose argmax is right there. Then

    simulated AL = 1 + a0 + a0 a1 + a0 a1 a2 + ...     tokens per target forward, bonus included
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def on_grid(values: Tensor, anchors: Tensor, depths: Tensor, row_length: int, num_depths: int) -> Tensor:
    """Slots [B, M] -> bool [B, n, K] by (anchor, depth); absent slots are False."""
    batch = values.shape[0]
    grid = torch.zeros(batch, row_length * num_depths, dtype=torch.bool, device=values.device)
    return grid.scatter(1, anchors * num_depths + depths, values).view(batch, row_length, num_depths)


@dataclass(slots=True)
class AcceptanceCount:
    """Running counts over validation batches."""

    num_depths: int
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = [0] * self.num_depths
        self.right = [0] * self.num_depths

    def add(self, hits: Tensor, supervised: Tensor, on_path: Tensor) -> None:
        """Count bool [B, n, K]: argmax right, slot supervised, and the data's token is the target's argmax.

        One anchor, hits [1, 1, 0], all supervised and on the path: reached [1, 1, 1], right [1, 1, 0].
        """
        good = hits & supervised
        through = (good & on_path).long().cumprod(-1).bool()
        before = torch.cat((torch.ones_like(through[..., :1]), through[..., :-1]), dim=-1)
        reached = before & supervised
        # A rollout that leaves its document at depth k has no depth after it.
        reached &= supervised.long().cumprod(-1).bool()
        for depth, (there, hit) in enumerate(
            zip(reached.sum((0, 1)).tolist(), (reached & hits).sum((0, 1)).tolist(), strict=True)
        ):
            self.reached[depth] += int(there)
            self.right[depth] += int(hit)

    @property
    def acceptance(self) -> list[float]:
        """Share accepted at each depth, given that it was reached."""
        return [hit / there if there else 0.0 for hit, there in zip(self.right, self.reached, strict=True)]

    @property
    def simulated_al(self) -> float:
        """1 + sum of products of acceptance."""
        total, product = 1.0, 1.0
        for share in self.acceptance:
            product *= share
            total += product
        return total
