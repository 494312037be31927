"""The losses of losses.py from whole logits, by autograd: what the definitions say, nothing saved.

Tests hold the fused versions against these; no run uses them.
"""

import torch
from torch import Tensor

from eyas.training.losses_chunk import LK_RATE, LossKind


def eager_losses(logits: Tensor, teacher_logits: Tensor, kind: LossKind = "soft_ce") -> Tensor:
    """Loss of every slot [C] from logits [C, Vd]."""
    q, p = torch.softmax(logits, -1), torch.softmax(teacher_logits, -1)
    overlap = torch.minimum(p, q).sum(-1)
    match kind:
        case "hard_ce":
            return -torch.log(q.gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1))
        case "soft_ce":
            return -(p * torch.log(q)).sum(-1)
        case "kl":
            return (p * torch.log(p / q)).sum(-1)
        case "tv":
            return 0.5 * (p - q).abs().sum(-1)
        case "lk_log":
            return -torch.log(overlap)
        case "lk_hybrid":
            share = torch.exp(-LK_RATE * overlap).detach()
            return share * (p * torch.log(p / q)).sum(-1) + (1 - share) * (1 - overlap)


def eager_slot_loss(
    logits: Tensor, teacher_logits: Tensor, weights: Tensor, kind: LossKind = "soft_ce"
) -> Tensor:
    """Weighted sum of them."""
    return (weights * eager_losses(logits, teacher_logits, kind)).sum()


def eager_reach(
    logits: Tensor,
    teacher_logits: Tensor,
    anchors: list[int],
    depths: list[int],
    dead: set[tuple[int, int]],
    hits: list[float] | None = None,
) -> list[float]:
    """Chance that each slot is reached, by a loop over the rollout before it; `dead` slots accept nothing.

    Slot (a, k) is reached if every slot (a, 0) .. (a, k - 1) that is present accepted: with the chance of its
    overlap or, where `hits` (0 or 1 a slot) are given, if it hit.
    """
    q, p = torch.softmax(logits, -1), torch.softmax(teacher_logits, -1)
    passing = hits or torch.minimum(p, q).sum(-1).tolist()
    places = list(zip(anchors, depths, strict=True))
    chances = []
    for anchor, depth in places:
        chance = 1.0
        for before in range(depth):
            if (anchor, before) in dead:
                chance = 0.0
            elif (anchor, before) in places:
                chance *= passing[places.index((anchor, before))]
        chances.append(chance)
    return chances
