"""Acceptance by depth on held-out rows, and the AL that greedy decoding of the same text would have.

An anchor reaches depth k if at every depth before it the drafter's argmax was the target's, and the data
went the same way (elsewhere the teacher speaks of another text). Of the anchors that reach depth k,
`acceptance[k]` is the share whose argmax is right there: a0, a1, ... of all anchors alike.

Decoding does not stand at all anchors alike: it jumps over what it accepts, and stands most often right
after a miss, where text is hard. `visited` walks as it does, and of the anchors there (v0, v1, ...)

    simulated AL = 1 + v0 + v0 v1 + v0 v1 v2 + ...     tokens per target forward, bonus included

Over all anchors the same sum is too high, the more so the more easy and hard text differ.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


def draft_argmax(normed: Tensor, head_weight: Tensor, *, chunk: int = 4096) -> Tensor:
    """Draft id with the largest logit of each slot: normed [..., D] -> int64 [...]."""
    flat = normed.reshape(-1, normed.shape[-1])
    weight = head_weight.to(flat.dtype)
    parts = [functional.linear(part, weight).argmax(-1) for part in torch.split(flat, chunk)]
    return torch.cat(parts).view(normed.shape[:-1])


def on_grid(values: Tensor, anchors: Tensor, depths: Tensor, row_length: int, num_depths: int) -> Tensor:
    """Slots [B, M] -> bool [B, n, K] by (anchor, depth); absent slots are False."""
    batch = values.shape[0]
    grid = torch.zeros(batch, row_length * num_depths, dtype=torch.bool, device=values.device)
    return grid.scatter(1, anchors * num_depths + depths, values).view(batch, row_length, num_depths)


def visited(supervised: Tensor, accepted: Tensor) -> Tensor:
    """Anchors at which decoding the data's own text drafts: bool [B, n], by a walk on the host.

    supervised bool [B, n]; accepted int [B, n], tokens that a draft from each anchor would have accepted. The
    first row of a run of supervised ones guesses the first token of an answer, which prefill gives.

    Supervised 0 1 1 1 1 1 0, accepted 0 0 2 0 0 1 0: anchors 2 and 2 + 2 + 1 = 5.
    """
    found = torch.zeros(supervised.shape, dtype=torch.bool)
    for row, (flags, steps) in enumerate(zip(supervised.tolist(), accepted.tolist(), strict=True)):
        places, anchor = [], 0
        for place, flag in enumerate(flags):
            if not flag:
                continue
            if place == 0 or not flags[place - 1]:
                anchor = place + 1
            elif place == anchor:
                places.append(place)
                anchor += steps[place] + 1
        found[row, places] = True
    return found.to(supervised.device)


@dataclass(slots=True)
class AcceptanceCount:
    """Running counts over validation batches: of all anchors, and of those that decoding visits."""

    num_depths: int
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    visited_reached: list[int] = field(default_factory=list)
    visited_right: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached, self.right, self.visited_reached, self.visited_right = (
            [0] * self.num_depths for _ in range(4)
        )

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
        walked = reached & visited(supervised[..., 0], through.sum(-1)).unsqueeze(-1)
        self.reached, self.right = _add(self.reached, reached), _add(self.right, reached & hits)
        self.visited_reached = _add(self.visited_reached, walked)
        self.visited_right = _add(self.visited_right, walked & hits)

    @property
    def acceptance(self) -> list[float]:
        """Share accepted at each depth, given that it was reached, over all anchors."""
        return _shares(self.right, self.reached)

    @property
    def visited_acceptance(self) -> list[float]:
        """The same over the anchors that decoding visits."""
        return _shares(self.visited_right, self.visited_reached)

    @property
    def simulated_al(self) -> float:
        """1 + sum of products of acceptance where decoding visits."""
        total, product = 1.0, 1.0
        for share in self.visited_acceptance:
            product *= share
            total += product
        return total


def _add(counts: list[int], flags: Tensor) -> list[int]:
    """Counts [K] and those of flags [B, n, K]."""
    return [count + int(more) for count, more in zip(counts, flags.sum((0, 1)).tolist(), strict=True)]


def _shares(right: list[int], reached: list[int]) -> list[float]:
    return [hit / there if there else 0.0 for hit, there in zip(right, reached, strict=True)]
