"""Loss of slots against the teacher, over the draft vocabulary, without ever holding all logits.

The teacher's logits are made from the target's final hidden state and its lm_head, cut to the Vd ids of the
draft vocabulary and renormalised there. The kinds of loss and their gradients stand in losses_chunk.py.

Slots whose teacher argmax lies outside the draft vocabulary (the out-of-vocabulary rule, `loss.oov`):
    mask    weight 0, EAGLE's rule: no draft can be right there. They stay counted in what the loss is divided
            by, and a rollout ends at such a slot (below).
    keep    trained against the renormalised p.

`slot_loss` walks over chunks of slots: logits, loss and the gradients of both inputs are made chunk by chunk
in the forward pass, backward only scales them. So its memory is chunk * Vd for the logits, Vd * D for the
gradient of the output matrix and slots * D for that of the hidden states; slots * Vd never appears.
losses_eager.py has the obvious twins that tests hold it against.

A slot's weight may follow the chance that decoding reaches it (`Reach`), taken as a constant: the product
over the slots of its rollout before it of the head's own overlaps with the teacher, or of its hits, which is
what greedy decoding does. Slot (a, 3) after overlaps 0.9, 0.8, 0.5 weighs 0.36, after hits 1, 0, 1 nothing:
what nobody will read costs little, and what a parallel slot learns is the text after the head's own guesses.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from eyas.training.losses_chunk import LossKind, chunk_loss

ReachBy = Literal["overlap", "hit"]


class Reach:
    """Chance to pass a batch's slots by (anchor, depth), filled as chunks come; depths must come in order.

    `share` in (0, 1] mixes: a slot's weight is multiplied by (1 - share) + share * chance of being reached.
    A slot is passed by its overlap with the teacher or, `by` hits, if its argmax is its answer. Anchors
    number all rows of the batch: row * n + anchor. Absent slots and unsupervised ones count as passed.
    """

    def __init__(
        self,
        num_anchors: int,
        num_depths: int,
        share: float,
        *,
        by: ReachBy = "overlap",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.share, self.by = share, by
        self.passing = torch.ones(num_anchors, num_depths, dtype=dtype, device=device)

    def end_rollouts(self, anchors: Tensor, depths: Tensor, ends: Tensor) -> None:
        """Slots [S] where `ends` (bool) are never passed: later slots of their rollouts are never reached."""
        flat, place = self.passing.view(-1), anchors * self.passing.shape[1] + depths
        flat[place] = torch.where(ends, 0.0, flat[place])

    def weigh(self, anchors: Tensor, depths: Tensor, weights: Tensor, passed: Tensor) -> Tensor:
        """Take in a chunk's overlaps or hits [C] where it has weight, and return its weights [C]."""
        width = self.passing.shape[1]
        flat, place = self.passing.view(-1), anchors * width + depths
        # Times what stands there: a slot that ends its rollout stays at zero.
        flat[place] *= torch.where(weights > 0, passed.to(flat.dtype), 1.0)
        before = torch.arange(width, device=depths.device) < depths.unsqueeze(-1)
        chance = torch.where(before, self.passing[anchors], 1.0).prod(-1)
        return weights * (1.0 - self.share + self.share * chance).to(weights.dtype)


class _SlotLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, where the logits are; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        head_weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        slot_index: Tensor,
        teacher_index: Tensor,
        weights: Tensor,
        answers: Tensor,
        kind: LossKind,
        chunk: int,
        chunk_fn: Any,
        reach: tuple[Reach, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        weight = head_weight.to(normed.dtype)
        wide = torch.float64 if normed.dtype == torch.float64 else torch.float32
        grad_normed = torch.zeros_like(normed) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(head_weight.shape, dtype=wide, device=normed.device)
        loss = torch.zeros((), dtype=wide, device=normed.device)
        hits = torch.zeros_like(slot_index, dtype=torch.bool)
        for begin in range(0, slot_index.numel(), chunk):
            part = slice(begin, begin + chunk)
            hidden = normed[slot_index[part]]
            logits = hidden @ weight.T
            teacher = teacher_hidden[teacher_index[part]] @ teacher_weight.T
            hits[part] = logits.argmax(-1) == answers[part]
            by_overlap = reach is not None and reach[0].by == "overlap"
            values, gradient, overlap = chunk_fn(logits, teacher, kind, overlap=by_overlap)
            scale = weights[part].to(wide)
            if reach is not None:
                passed = overlap if by_overlap else hits[part]
                scale = reach[0].weigh(reach[1][part], reach[2][part], scale, passed)
            loss += (scale * values).sum()
            # A row's weight scales [C, D] operands, not [C, Vd] ones.
            column = scale.unsqueeze(-1).to(normed.dtype)
            if grad_normed is not None:
                grad_normed.index_copy_(0, slot_index[part], (gradient @ weight) * column)
            if grad_weight is not None:
                grad_weight += gradient.T @ (hidden * column)
        ctx.save_for_backward(grad_normed, None if grad_weight is None else grad_weight.to(head_weight.dtype))
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_hits: Tensor) -> Any:  # noqa: ARG004
        grad_normed, grad_weight = ctx.saved_tensors
        gradients = (
            None if gradient is None else gradient * grad_loss.to(gradient.dtype)
            for gradient in (grad_normed, grad_weight)
        )
        return (*gradients, *(None,) * 10)


def slot_loss(
    normed: Tensor,
    head_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    slot_index: Tensor,
    teacher_index: Tensor,
    weights: Tensor,
    answers: Tensor,
    kind: LossKind = "soft_ce",
    chunk: int = 4096,
    chunk_fn: Any = chunk_loss,
    reach: tuple[Reach, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over C chosen slots of weight * loss, and whether each slot's argmax is its answer (bool [C]).

    normed [S, D] are all slots, of which slot_index [C] (distinct) are taken; teacher_hidden [T, D] with
    teacher_index [C] and teacher_weight [Vd, D] give the teacher's logits; answers [C] are draft ids (-1:
    never a hit). Gradients flow to normed and head_weight [Vd, D]. `reach` is a Reach with the anchors [C]
    and depths [C] of the chosen slots, which must then come depth by depth.
    """
    result: tuple[Tensor, Tensor] = _SlotLoss.apply(  # type: ignore[no-untyped-call]
        normed,
        head_weight,
        teacher_hidden,
        teacher_weight,
        slot_index,
        teacher_index,
        weights,
        answers,
        kind,
        chunk,
        chunk_fn,
        reach,
    )
    return result


def compact(weights: Tensor, size: int) -> Tensor:
    """Indices of the nonzero weights [S], then of others, `size` in all: int64 [size]; no host sync.

    The caller knows a bound of how many are nonzero; weights [0, 2, 0, 1], size 3 -> [1, 3, 0].
    """
    return (weights == 0).to(torch.int8).argsort(stable=True)[:size]
