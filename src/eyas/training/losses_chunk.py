"""Loss of a chunk of slots from their logits: value, gradient and overlap in closed form.

With z the drafter's logits over the Vd draft ids, q = softmax(z), p the teacher's distribution on the same
ids:

    soft_ce    -sum p log q                  gradient in z: q - p
    kl         sum p log(p / q)              the same gradient; the value is 0 for a perfect drafter
    hard_ce    -log q[argmax p]              q - onehot
    tv         1 - a                         -g, where a = sum min(p, q) is the overlap
    lk_log     -log a                        -g / a
    lk_hybrid  l KL + (1 - l) (1 - a)        l (q - p) - (1 - l) g, where l = exp(-3 a) is held constant

    g = da/dz = q (m - <q, m>), m = [q < p]

The overlap is the chance that speculative sampling accepts a draft of q: 1 minus the total variation
distance. The last three train on it (LK losses, arXiv 2602.23881); plain tv has nearly no gradient where p
and q barely overlap, which lk_log repairs by dividing by a, and lk_hybrid by beginning as KL.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

LossKind = Literal["soft_ce", "kl", "hard_ce", "tv", "lk_log", "lk_hybrid"]

LK_RATE = 3.0
"""Rate at which lk_hybrid leaves KL for the overlap (its paper's value)."""
LEAST_OVERLAP = 1e-6
"""Floor of a under lk_log's logarithm and division: a slot without any overlap must not give infinity."""


def chunk_loss(
    logits: Tensor, teacher: Tensor, kind: LossKind, *, overlap: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Unweighted loss [C], its gradient in the logits [C, Vd] (in their dtype), and the overlap [C].

    logits and teacher logits [C, Vd]; softmaxes are made in float32 (float64 for float64). The overlap is
    zeros where nobody needs it: `overlap` is false and the kind does not.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_q, log_p = logits.to(wide).log_softmax(-1), teacher.to(wide).log_softmax(-1)
    q = log_q.exp()
    p = log_p.exp()
    on_overlap = kind in ("tv", "lk_log", "lk_hybrid")
    shared = torch.minimum(p, q).sum(-1) if overlap or on_overlap else log_q.new_zeros(len(log_q))
    if kind == "hard_ce":
        best = log_p.argmax(-1)
        loss = -log_q.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        return loss, (q - functional.one_hot(best, q.shape[-1]).to(wide)).to(logits.dtype), shared
    if not on_overlap:
        loss = -(p * (log_q - log_p if kind == "kl" else log_q)).sum(-1)
        return loss, (q - p).to(logits.dtype), shared
    below = (q < p).to(wide)
    rise = q * (below - (q * below).sum(-1, keepdim=True))
    if kind == "tv":
        return 1.0 - shared, -rise.to(logits.dtype), shared
    if kind == "lk_log":
        kept = shared.clamp_min(LEAST_OVERLAP)
        return -kept.log(), (-rise / kept.unsqueeze(-1)).to(logits.dtype), shared
    share = torch.exp(-LK_RATE * shared)
    loss = share * (p * (log_p - log_q)).sum(-1) + (1.0 - share) * (1.0 - shared)
    share = share.unsqueeze(-1)
    return loss, (share * (q - p) - (1.0 - share) * rise).to(logits.dtype), shared
