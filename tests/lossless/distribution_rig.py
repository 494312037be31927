"""A synthetic target and synthetic drafters, run for tens of thousands of seeds as rows of one batch.

The target is a random table: logits of the next token given the last two. Its exact joint distribution over
the first three output tokens is enumerated by the naive twin (tests/naive_sampling.py), processors included.
`decode` is the speculative loop alone: draft, verify by the rule that is handed in, commit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import naive_sampling
from eyas.core.sampling import SamplingParams
from eyas.core.vocab_map import VocabMap
from eyas.engine.sampler import Needs, SamplingState, choose, needs_of, row_positions, target_probs
from eyas.kernels.reference.random import DRAFT, draw, uniform
from eyas.verify.accepted import Accepted
from eyas.verify.greedy import accept_by_match
from eyas.verify.rejection import reject_sampled

V = 6
NUM_TOKENS = 3
EOS = 5
PROMPT = (1, 3, 2)


@dataclass
class Step:
    """All that a verification rule may look at."""

    logits: Tensor
    state: SamplingState
    slots: Tensor
    drafts: Tensor
    q: Tensor | None
    position0: Tensor
    history: Tensor
    needs: Needs

    def rows(self, drafts: Tensor | None = None) -> tuple:
        """Arguments of choose and target_probs."""
        drafts = self.drafts if drafts is None else drafts
        return self.logits, self.state, self.slots, drafts, self.position0, self.history, self.needs

    @property
    def seeds(self) -> Tensor:
        return self.state.seeds[self.slots]

    @property
    def positions(self) -> Tensor:
        return row_positions(self.position0, self.logits.shape[1])


Rule = Callable[[Step], Accepted]


def match_rule(step: Step) -> Accepted:
    """What the engine does with point-mass drafts."""
    return accept_by_match(choose(*step.rows()).tokens, step.drafts)


def rejection_rule(step: Step) -> Accepted:
    """What the engine does with sampled drafts."""
    p = target_probs(*step.rows()).probs
    return reject_sampled(p, step.q, step.drafts, step.seeds, step.positions)


def target_table() -> Tensor:
    """Logits [before last, last, next]."""
    return torch.randn(V, V, V, generator=torch.Generator().manual_seed(11)) * 1.5


class Drafter:
    """Guesses from its own table, which is the target's with noise; `vocab_map` reduces what it can name."""

    def __init__(self, *, sampled: bool, vocab_map: VocabMap | None = None, noise: float = 1.0) -> None:
        self.vocab_map = vocab_map or VocabMap.identity(V)
        self.sampled = sampled
        wrong = torch.randn(V, V, V, generator=torch.Generator().manual_seed(12)) * noise
        self.table = self.vocab_map.restrict(target_table() + wrong)

    def propose(self, before: Tensor, last: Tensor, seeds: Tensor, positions: Tensor):
        """Drafts [B, K] and q [B, K, V]; positions [B, K] are those of the drafted tokens."""
        drafts, q = [], []
        for depth in range(positions.shape[1]):
            probs = self.table[before, last].softmax(-1)
            if self.sampled:
                guess = draw(probs, uniform(seeds, positions[:, depth], DRAFT))
            else:
                guess = probs.argmax(-1)
            token = self.vocab_map.to_target(guess)
            drafts.append(token)
            q.append(self.vocab_map.scatter(probs))
            before, last = last, token
        return torch.stack(drafts, 1), torch.stack(q, 1) if self.sampled else None


def broadcast_state(params: SamplingParams, num_rows: int) -> SamplingState:
    """One request's parameters under num_rows seeds, its lists cut short to save memory."""
    state = SamplingState(1, V, eos_token_ids=(EOS,))
    state.set_row(0, params, num_prompt_tokens=len(PROMPT), seed=0)
    for name in ("floats", "ints", "bias_ids", "bias_values", "stop_ids"):
        row = getattr(state, name)[:1, :8]
        setattr(state, name, row.repeat(num_rows, 1))
    state.seeds.copy_(torch.arange(num_rows) * 7919 + 13)
    return state


def decode(rule: Rule, drafter: Drafter, params: SamplingParams, *, num_drafts: int, num_rows: int) -> Tensor:
    """First NUM_TOKENS output tokens of every row, int64 [num_rows, NUM_TOKENS]."""
    table = target_table()
    state = broadcast_state(params, num_rows)
    slots = torch.arange(num_rows)
    length = len(PROMPT) + NUM_TOKENS * (num_drafts + 1)
    history = torch.zeros(num_rows, length, dtype=torch.int64)
    history[:, : len(PROMPT)] = torch.tensor(PROMPT)
    position0 = torch.full((num_rows,), len(PROMPT))
    for _ in range(NUM_TOKENS):  # every step commits at least one token
        last = history.gather(1, position0.unsqueeze(1) - 1)
        before = history.gather(1, position0.unsqueeze(1) - 2)
        positions = row_positions(position0, num_drafts + 1)
        drafts, q = drafter.propose(
            before.squeeze(1), last.squeeze(1), state.seeds, positions[:, :num_drafts]
        )
        row_last = torch.cat([last, drafts], 1)
        row_before = torch.cat([before, last, drafts[:, :-1]], 1)
        logits = table[row_before, row_last]
        accepted = rule(Step(logits, state, slots, drafts, q, position0, history, needs_of(params)))
        # Entries past the count are written too and overwritten by the next step, as in the engine.
        history.scatter_(1, positions, accepted.tokens)
        position0 = position0 + accepted.counts
    return history[:, len(PROMPT) : len(PROMPT) + NUM_TOKENS]


def exact_joint(params: SamplingParams) -> np.ndarray:
    """Probability of every triple of first tokens, float64 [V**3], by enumeration."""
    table = target_table()
    stops = {EOS, *params.stop_token_ids}
    joint = np.zeros((V,) * NUM_TOKENS)

    def extend(output: list[int], mass: float) -> None:
        if len(output) == NUM_TOKENS:
            joint[tuple(output)] = mass
            return
        known = [*PROMPT, *output]
        logits = table[known[-2], known[-1]].tolist()
        p = naive_sampling.target_probs(logits, params, list(PROMPT), output, stops)
        for token in range(V):
            extend([*output, token], mass * p[token])

    extend([], 1.0)
    return joint.ravel()


def p_value(tokens: Tensor, joint: np.ndarray) -> float:
    """Chi-square goodness of fit over all triples; cells with fewer than 5 expected are pooled.

    0.0 if a triple of probability zero was seen.
    """
    weights = torch.tensor([V**2, V, 1])
    observed = torch.bincount((tokens * weights).sum(1), minlength=V**3).double().numpy()
    if observed[joint == 0].any():
        return 0.0
    expected = joint * len(tokens)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:  # too little even together: joins the smallest cell
        smallest = expected[:-1].argmin()
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    expected *= observed.sum() / expected.sum()
    return float(stats.chisquare(observed, expected).pvalue)
