"""Speculative sampling with sampled drafts (Leviathan et al. 2023; Chen et al. 2023).

Draft x was drawn from q. It is accepted with probability min(1, p(x) / q(x)); the first rejected row takes
a token from the residual max(p - q, 0), normalised; a run without rejection takes one more from p. The
committed tokens then have the distribution p, whatever q is:

    accepted as a draft      q(x) min(1, p(x) / q(x))                          = min(p(x), q(x))
    from the residual        (1 - sum_y min(p(y), q(y))) * residual(x)         = max(p(x) - q(x), 0)
    together                                                                     p(x)

q is what the drafts were really drawn from, over the target's vocabulary: tokens that a reduced draft
vocabulary lacks have q = 0, and p is never renormalised. p is the target's distribution after every
sampling processor, row i having seen the drafts before it. A greedy row is the p with all mass on one token.
"""

import torch
from torch import Tensor

from eyas.kernels.reference.random import ACCEPT, RESIDUAL, TARGET, draw, uniform
from eyas.verify.accepted import Accepted


def accept_drafts(probs: Tensor, draft_probs: Tensor, drafts: Tensor, uniforms: Tensor) -> Tensor:
    """Which drafts pass their own test, bool [B, K]: u < p(x) / q(x), and never for p(x) = 0 or no draft.

    Args:
        probs: p, [B, K, V].
        draft_probs: q, [B, K, V].
        drafts: int64 [B, K]; -1 for no draft.
        uniforms: float64 [B, K].
    """
    index = drafts.clamp(min=0).unsqueeze(-1)
    p = probs.gather(-1, index).squeeze(-1).double()
    q = draft_probs.gather(-1, index).squeeze(-1).double()
    return (uniforms * q < p) & (drafts >= 0)


def residual(probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Normalise max(p - q, 0) over the last dimension; p itself where rounding leaves nothing."""
    left = (probs - draft_probs).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, probs)


def reject_sampled(
    probs: Tensor, draft_probs: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor
) -> Accepted:
    """Accept a prefix of sampled drafts and choose the token after it.

    Example, K = 2, V = 2, p = [[.5, .5]] * 3, q = [[1, 0], [.5, .5]], drafts [0, 1]: draft 0 is accepted
    half of the time, else token 1 (all of the residual) is committed alone; draft 1 is always accepted,
    and then a third token comes from p.

    Args:
        probs: p, float [B, K + 1, V].
        draft_probs: q, float [B, K, V].
        drafts: int64 [B, K], each drawn from its q; -1 for no draft (that row then chooses from p).
        seeds: int64 [B].
        positions: int64 [B, K + 1], absolute position of the token that each row chooses.
    """
    num_requests, num_rows, vocab_size = probs.shape
    num_drafts = num_rows - 1
    accepted = accept_drafts(
        probs[:, :-1], draft_probs, drafts, uniform(seeds.unsqueeze(1), positions[:, :-1], ACCEPT)
    )
    num_accepted = accepted.long().cumprod(1).sum(1)

    # Only the row after the accepted drafts is ever drawn from.
    last = num_accepted.unsqueeze(1)
    p_last = probs.gather(1, last.unsqueeze(-1).expand(-1, 1, vocab_size)).squeeze(1)
    position = positions.gather(1, last).squeeze(1)
    # A zero row of q stands behind the last draft, and where there was no draft: the residual is then p.
    padded_drafts = torch.cat([drafts, drafts.new_full((num_requests, 1), -1)], 1)
    has_draft = padded_drafts.gather(1, last) >= 0
    if num_drafts:
        q_index = last.clamp(max=num_drafts - 1).unsqueeze(-1).expand(-1, 1, vocab_size)
        q_last = draft_probs.gather(1, q_index).squeeze(1)
        p_last = torch.where(has_draft, residual(p_last, q_last), p_last)
    uniforms = torch.where(
        has_draft.squeeze(1), uniform(seeds, position, RESIDUAL), uniform(seeds, position, TARGET)
    )
    tokens = padded_drafts.clamp(min=0).scatter(1, last, draw(p_last, uniforms).unsqueeze(1))
    return Accepted(tokens, num_accepted + 1)
