"""Loss of slots against the teacher, over the draft vocabulary, without ever holding all logits.

The teacher's logits are cut to the Vd ids of the draft vocabulary and renormalised there. With z the
drafter's logits, q = softmax(z), p the teacher's distribution and w the slot's weight:

    soft_ce   w * -sum p log q         gradient in z: w (q - p)
    kl        w * sum p log(p / q)     the same gradient; the value is 0 for a perfect drafter
    hard_ce   w * -log q[argmax p]     gradient in z: w (q - onehot)

Slots whose teacher argmax lies outside the draft vocabulary get weight 0 where `oov` is "mask" (EAGLE's rule:
no draft can be right there) and are trained against the renormalised p where it is "keep".

`slot_loss` walks over chunks of slots: logits, loss and the gradients of both inputs are made chunk by chunk,
so memory does not grow with slots x Vd. `eager_slot_loss` is the obvious twin that tests hold it against.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

LossKind = Literal["soft_ce", "kl", "hard_ce"]


def chunk_loss(logits: Tensor, teacher: Tensor, weights: Tensor, kind: LossKind) -> tuple[Tensor, Tensor]:
    """Weighted loss (scalar) and its gradient in logits [C, Vd]; teacher logits [C, Vd], weights [C]."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_q = logits.to(wide).log_softmax(-1)
    log_p = teacher.to(wide).log_softmax(-1)
    weights = weights.to(wide)
    if kind == "hard_ce":
        p = functional.one_hot(log_p.argmax(-1), log_p.shape[-1]).to(wide)
        loss = -(p * log_q).sum(-1)
    else:
        p = log_p.exp()
        loss = -(p * (log_q - log_p if kind == "kl" else log_q)).sum(-1)
    gradient = weights.unsqueeze(-1) * (log_q.exp() - p)
    return (weights * loss).sum(), gradient.to(logits.dtype)


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
    ) -> tuple[Tensor, Tensor]:
        weight = head_weight.to(normed.dtype)
        wide = torch.float64 if normed.dtype == torch.float64 else torch.float32
        want = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_normed = torch.zeros_like(normed) if want else None
        grad_weight = torch.zeros(head_weight.shape, dtype=wide, device=normed.device) if want else None
        loss = torch.zeros((), dtype=wide, device=normed.device)
        hits = torch.zeros_like(slot_index, dtype=torch.bool)
        for begin in range(0, slot_index.numel(), chunk):
            part = slice(begin, begin + chunk)
            hidden = normed[slot_index[part]]
            logits = hidden @ weight.T
            teacher = teacher_hidden[teacher_index[part]] @ teacher_weight.T
            hits[part] = logits.argmax(-1) == answers[part]
            value, gradient = chunk_fn(logits, teacher, weights[part], kind)
            loss += value
            if grad_normed is not None and grad_weight is not None:
                grad_normed.index_copy_(0, slot_index[part], gradient @ weight)
                grad_weight += gradient.T @ hidden
        if want:
            ctx.save_for_backward(grad_normed, grad_weight.to(head_weight.dtype))  # type: ignore[union-attr]
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_hits: Tensor) -> Any:  # noqa: ARG004
        grad_normed, grad_weight = ctx.saved_tensors
        none = (None,) * 9
        return (
            grad_normed * grad_loss.to(grad_normed.dtype),
            grad_weight * grad_loss.to(grad_weight.dtype),
            *none,
        )


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
) -> tuple[Tensor, Tensor]:
    """Sum over C chosen slots of weight * loss, and whether each slot's argmax is its answer (bool [C]).

    normed [S, D] are all slots, of which slot_index [C] (distinct) are taken; teacher_hidden [T, D] with
    teacher_index [C] and teacher_weight [Vd, D] give the teacher's logits; answers [C] are draft ids (-1:
    never a hit). Gradients flow to normed and head_weight [Vd, D].
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
    )
    return result


def eager_slot_loss(
    logits: Tensor, teacher_logits: Tensor, weights: Tensor, kind: LossKind = "soft_ce"
) -> Tensor:
    """The same loss from whole logits [C, Vd], by autograd: what the definition says, nothing saved."""
    log_q = torch.log(torch.softmax(logits, -1))
    p = torch.softmax(teacher_logits, -1)
    if kind == "hard_ce":
        return (weights * -log_q.gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1)).sum()
    cross_entropy = -(p * log_q).sum(-1)
    if kind == "kl":
        cross_entropy = cross_entropy + (p * torch.log(p)).sum(-1)
    return (weights * cross_entropy).sum()


def compact(weights: Tensor, size: int) -> Tensor:
    """Indices of the nonzero weights [S], then of others, `size` in all: int64 [size]; no host sync.

    The caller knows a bound of how many are nonzero; weights [0, 2, 0, 1], size 3 -> [1, 3, 0].
    """
    return (weights == 0).to(torch.int8).argsort(stable=True)[:size]
