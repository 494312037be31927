"""The correction by the token before: slot k's logits also hear which token slot k - 1 chose.

P-EAGLE's depths are marginals: each is guessed without knowing the guess before it, so a slot that could go
two ways makes its successors waver between both. Two forms, R small, both for k >= 1 (depth 0 reads its token
as an input):

    tables    logits_k = lm_head(normed_k) + U T[prev]           DSpark's Markov head (arXiv 2607.05147)
    hidden    logits_k = lm_head(normed_k + W2 silu(W1h normed_k + W1e E[prev] + b))

T, U [Vd, R]; W1h, W1e [R, D], b [R], W2 [D, R]; E the head's embedding table. The second hears what the slot
itself saw, too. The layers still run once for all depths: in decoding both forms are

    logits_k = L_k + M act(A_k + P[prev])       L = lm_head(normed)

    tables    A none, act nothing, P = T, M = U
    hidden    A = W1h normed + b of all k at once, act silu; P = E[draft ids] W1e^T and M = lm_head W2, made
              once

so only a product of R numbers is made one depth after the other (kernels/reference/step_markov.py). In
training the token before is the one that stands in the data. U and W2 start as zeros, so a head begins as it
was.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.core.batch import Committed, Draft
from eyas.core.vocab_map import VocabMap
from eyas.drafters.choose import Uniform, choose_by_sampling
from eyas.drafters.head_config import HeadConfig
from eyas.kernels import dispatch
from eyas.nn.linear import Linear


class MarkovTables(NamedTuple):
    """P and M [Vd, R] of the decoding form."""

    table: Tensor
    out: Tensor


class TableMarkov(nn.Module):
    """Form `tables`: T with rows of norm about 1 (`reset`), U of zeros."""

    silu = False

    def __init__(self, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(draft_vocab_size, rank))
        self.out = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.reset(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def reset(self, generator: torch.Generator, *, normed_rms: float = 1.0, token_rms: float = 1.0) -> None:  # noqa: ARG002
        """Draw T anew from a CPU generator; U back to zeros. Sizes of inputs are the other form's."""
        noise = torch.randn(self.table.shape, generator=generator)
        self.table.copy_(noise / self.table.shape[1] ** 0.5)
        self.out.zero_()

    def rows(self, previous: Tensor) -> Tensor:
        """T's rows of draft ids int64 [...]: [..., R]; zeros where there is none (-1)."""
        return self.table[previous.clamp(min=0)] * (previous >= 0).unsqueeze(-1).to(self.table.dtype)

    def joined(self, normed: Tensor, head_weight: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The corrected logits as one product: (normed [..., D + R], weight [Vd, D + R]).

        previous int64 [...] are draft ids, -1 for no correction. What the fused loss takes instead of
        normed [..., D] and lm_head's weight [Vd, D].
        """
        rows = self.rows(previous).to(normed.dtype)
        return torch.cat((normed, rows), -1), torch.cat((head_weight, self.out), -1)

    def tables(self, embedded: Tensor, head_weight: Tensor) -> MarkovTables:  # noqa: ARG002
        """The decoding form: these weights themselves."""
        return MarkovTables(self.table, self.out)

    def pre(self, normed: Tensor) -> Tensor | None:  # noqa: ARG002
        """A of the decoding form: none."""
        return None


class HiddenMarkov(nn.Module):
    """Form `hidden`: `hidden` is W1h and b, `token` W1e, `up` W2."""

    silu = True

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.hidden = Linear(hidden_size, rank)
        self.token = Linear(hidden_size, rank, bias=False)
        self.up = Linear(rank, hidden_size, bias=False)
        self.reset(torch.Generator().manual_seed(0))

    @torch.no_grad()
    def reset(self, generator: torch.Generator, *, normed_rms: float = 1.0, token_rms: float = 1.0) -> None:
        """Draw W1h and W1e anew from a CPU generator, b and W2 back to zeros.

        Inputs of the given root mean squares (of normed, of E) each give half of pre-activations of size 1.
        """
        for layer, rms in ((self.hidden, normed_rms), (self.token, token_rms)):
            noise = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.copy_(noise / (max(rms, 1e-6) * (2 * layer.in_features) ** 0.5))
        self.hidden.bias.zero_()
        self.up.weight.zero_()

    def corrected(self, normed: Tensor, token_part: Tensor, there: Tensor) -> Tensor:
        """Correct normed [..., D] where `there` (bool [...]) is a token before.

        token_part [..., R] is W1e E[prev].
        """
        change = self.up(functional.silu(self.hidden(normed) + token_part))
        return normed + torch.where(there.unsqueeze(-1), change, 0.0).to(normed.dtype)

    def tables(self, embedded: Tensor, head_weight: Tensor) -> MarkovTables:
        """The decoding form, of E's rows of the draft ids [Vd, D] and lm_head's weight [Vd, D]."""
        wide = torch.promote_types(head_weight.dtype, torch.float32)
        table = embedded.to(wide) @ self.token.weight.to(wide).T
        out = head_weight.to(wide) @ self.up.weight.to(wide)
        return MarkovTables(table.to(head_weight.dtype), out.to(head_weight.dtype))

    def pre(self, normed: Tensor) -> Tensor | None:
        """A of the decoding form: normed [..., D] -> [..., R]."""
        out: Tensor = self.hidden(normed)
        return out


def make_markov(config: HeadConfig) -> TableMarkov | HiddenMarkov | None:
    """A head's correction with fresh weights, if it has one."""
    if not config.markov_rank:
        return None
    if config.markov_form == "tables":
        return TableMarkov(config.draft_vocab_size, config.markov_rank)
    return HiddenMarkov(config.hidden_size, config.markov_rank)


def sample_chain(
    logits: Tensor,
    pre: Tensor | None,
    tables: MarkovTables,
    vocab_map: VocabMap,
    committed: Committed,
    uniform: Uniform,
    *,
    silu: bool,
) -> Draft:
    """Draw depth by depth from uncorrected logits [B, K, Vd] and pre [B, K, R] (A above).

    q of a depth is the distribution that it was drawn from, given the token drawn before it.
    """
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    for depth in range(logits.shape[1]):
        current = logits[:, depth : depth + 1]
        if tokens:
            row = tables.table[torch.searchsorted(vocab_map.target_ids, tokens[-1])]
            row = row if pre is None else pre[:, depth : depth + 1] + row
            row = functional.silu(row) if silu else row
            current = dispatch.linear(row, tables.out, residual=current)
        drawn, q = choose_by_sampling(current, vocab_map, committed, depth, uniform)
        tokens.append(drawn)
        probs.append(q)
    return Draft(torch.cat(tokens, 1), torch.cat(probs, 1))
