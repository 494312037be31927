"""At T > 0 the first three committed tokens are distributed as the target's own.

Chi-square over all 216 triples of a vocabulary of 6, against exact enumeration, 30,000 seeds a case. A case
fails below p = 1e-6: with fresh seeds a correct rule would fail once in a million runs of a case, once in
about 60,000 runs of this file. The seeds are fixed, so in fact it passes always or never.

The second half breaks the rules on purpose. Each broken rule must be detected at the same threshold, or the
first half would prove nothing.
"""

import pytest
import torch
from distribution_rig import Drafter, V, decode, exact_joint, match_rule, p_value, rejection_rule

from eyas.core.sampling import SamplingParams
from eyas.core.vocab_map import VocabMap
from eyas.engine.sampler import choose, target_probs
from eyas.kernels.reference.random import ACCEPT, RESIDUAL, TARGET, draw, uniform
from eyas.verify.accepted import Accepted
from eyas.verify.greedy import accept_by_match
from eyas.verify.rejection import accept_drafts, reject_sampled, residual

ALPHA = 1e-6
NUM_ROWS = 30000
REDUCED = VocabMap(torch.tensor([0, 2, 3, 5]), V)

PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.8, top_p=0.85, top_k=4)
MIN_P = SamplingParams(temperature=1.3, min_p=0.15)
PENALIZED = SamplingParams(
    temperature=1.0, repetition_penalty=1.4, presence_penalty=0.9, frequency_penalty=0.7, min_tokens=2
)
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=5,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={0: 0.8, 4: -0.6},
    min_tokens=1,
)
POINT = Drafter(sampled=False)
SAMPLED = Drafter(sampled=True)
SAMPLED_REDUCED = Drafter(sampled=True, vocab_map=REDUCED)
POINT_REDUCED = Drafter(sampled=False, vocab_map=REDUCED)

CASES = {
    "point mass": (match_rule, POINT, PLAIN, 3),
    "point mass, K 1": (match_rule, POINT, PLAIN, 1),
    "point mass, reduced vocabulary": (match_rule, POINT_REDUCED, PLAIN, 3),
    "point mass, top-p and top-k": (match_rule, POINT, FILTERED, 3),
    "point mass, penalties": (match_rule, POINT, PENALIZED, 3),
    "point mass, everything": (match_rule, POINT, EVERYTHING, 2),
    "sampled": (rejection_rule, SAMPLED, PLAIN, 3),
    "sampled, K 1": (rejection_rule, SAMPLED, PLAIN, 1),
    "sampled, K 2": (rejection_rule, SAMPLED, PLAIN, 2),
    "sampled, poor drafter": (rejection_rule, Drafter(sampled=True, noise=4.0), PLAIN, 3),
    "sampled, perfect drafter": (rejection_rule, Drafter(sampled=True, noise=0.0), PLAIN, 3),
    "sampled, reduced vocabulary": (rejection_rule, SAMPLED_REDUCED, PLAIN, 3),
    "sampled, top-p and top-k": (rejection_rule, SAMPLED, FILTERED, 3),
    "sampled, min-p": (rejection_rule, SAMPLED, MIN_P, 3),
    "sampled, penalties": (rejection_rule, SAMPLED, PENALIZED, 3),
    "sampled, reduced, everything": (rejection_rule, SAMPLED_REDUCED, EVERYTHING, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution_is_the_targets(name):
    rule, drafter, params, num_drafts = CASES[name]
    tokens = decode(rule, drafter, params, num_drafts=num_drafts, num_rows=NUM_ROWS)

    assert p_value(tokens, exact_joint(params)) > ALPHA


@pytest.mark.parametrize("params", [PLAIN, FILTERED, PENALIZED, EVERYTHING])
@pytest.mark.parametrize("drafter", [POINT, POINT_REDUCED])
def test_point_mass_drafts_give_the_same_tokens_seed_by_seed(drafter, params):
    """Stronger than any statistic: with and without drafts, every seed gives the same tokens."""
    none = decode(match_rule, BLIND, params, num_drafts=2, num_rows=2000)
    tokens = decode(match_rule, drafter, params, num_drafts=3, num_rows=2000)

    assert torch.equal(tokens, none)


class Blind(Drafter):
    """Never has a proposal, so that every step is a step of plain decoding."""

    def propose(self, before, last, seeds, positions):
        return torch.full_like(positions, -1), None


BLIND = Blind(sampled=False)


# Broken rules. Each is the product's rule with one thing wrong.


def assemble(p, accepted, drafts, uniforms_of, last_probs):
    """Commit the accepted prefix and one token from last_probs(number accepted)."""
    count = accepted.long().cumprod(1).sum(1)
    token = draw(last_probs(count), uniforms_of(count))
    padded = torch.nn.functional.pad(drafts, (0, 1))
    return Accepted(padded.scatter(1, count.unsqueeze(1), token.unsqueeze(1)), count + 1)


def row(tensor, index):
    return tensor[torch.arange(len(tensor)), index]


def rejection_with(*, accept=accept_drafts, rest=residual, last_stream=RESIDUAL):
    """The rejection rule in other words, with parts that can be replaced."""

    def rule(step):
        p = target_probs(*step.rows()).probs
        num_drafts = step.drafts.shape[1]
        uniforms = uniform(step.seeds.unsqueeze(1), step.positions[:, :num_drafts], ACCEPT)
        accepted = accept(p[:, :-1], step.q, step.drafts, uniforms)
        q = torch.cat([step.q, torch.zeros_like(p[:, :1])], 1)

        def uniforms_of(count):
            position = row(step.positions, count)
            rejected = uniform(step.seeds, position, last_stream)
            return torch.where(count < num_drafts, rejected, uniform(step.seeds, position, TARGET))

        return assemble(p, accepted, step.drafts, uniforms_of, lambda n: rest(row(p, n), row(q, n)))

    return rule


def renormalised_to_draft_vocabulary(step):
    """The target's distribution is restricted to the tokens that the drafter can name."""
    p = target_probs(*step.rows()).probs * REDUCED.t2d
    p = p / p.sum(-1, keepdim=True)
    return reject_sampled(p, step.q, step.drafts, step.seeds, step.positions)


def q_of_the_next_depth(step):
    p = target_probs(*step.rows()).probs
    return reject_sampled(p, step.q.roll(-1, dims=1), step.drafts, step.seeds, step.positions)


def q_of_the_argmax(step):
    """Sampled drafts, verified as if they were point masses but by p/q with q = 1 on the draft."""
    p = target_probs(*step.rows()).probs
    q = torch.nn.functional.one_hot(step.q.argmax(-1), V).float()
    return reject_sampled(p, q, step.drafts, step.seeds, step.positions)


def p_without_processors(step):
    """The drafts are judged by the raw distribution, as engines did that dropped their processors."""
    return reject_sampled(step.logits.softmax(-1), step.q, step.drafts, step.seeds, step.positions)


def blind_to_drafted_prefix(step):
    """Penalties and min-tokens as they were before the first draft, in every row."""
    return accept_by_match(choose(*step.rows(torch.full_like(step.drafts, -1))).tokens, step.drafts)


def blind_to_drafted_prefix_rejection(step):
    p = target_probs(*step.rows(torch.full_like(step.drafts, -1))).probs
    return reject_sampled(p, step.q, step.drafts, step.seeds, step.positions)


def one_uniform_for_all_rows(step):
    """Rows share the number of the first position, so tokens of a run depend on each other."""
    p = target_probs(*step.rows()).probs
    choices = draw(p, uniform(step.seeds, step.position0, TARGET).unsqueeze(1).expand(p.shape[:2]))
    return accept_by_match(choices, step.drafts)


def accept_always_point_mass(step):
    choices = choose(*step.rows()).tokens
    return Accepted(torch.cat([step.drafts, choices[:, -1:]], 1), torch.full_like(step.position0, 4))


BROKEN = {
    "accept always": (rejection_with(accept=lambda p, q, x, u: u < 2), SAMPLED, PLAIN),
    "accept always, point mass": (accept_always_point_mass, POINT, PLAIN),
    "accept with p instead of p / q": (
        rejection_with(accept=lambda p, q, x, u: u < p.gather(-1, x.unsqueeze(-1)).squeeze(-1)),
        SAMPLED,
        PLAIN,
    ),
    "residual not subtracted": (rejection_with(rest=lambda p, q: p), SAMPLED, PLAIN),
    "renormalised to the draft vocabulary": (renormalised_to_draft_vocabulary, SAMPLED_REDUCED, PLAIN),
    "q off by one depth": (q_of_the_next_depth, SAMPLED, PLAIN),
    "q of the argmax": (q_of_the_argmax, SAMPLED, PLAIN),
    "processors dropped": (p_without_processors, SAMPLED, FILTERED),
    "penalties ignore the drafted prefix": (blind_to_drafted_prefix, POINT, PENALIZED),
    "penalties ignore the drafted prefix, sampled": (blind_to_drafted_prefix_rejection, SAMPLED, PENALIZED),
    "one uniform for accept and residual": (rejection_with(last_stream=ACCEPT), SAMPLED, PLAIN),
    "one uniform for all rows": (one_uniform_for_all_rows, POINT, PLAIN),
}


def test_the_frame_of_the_broken_rules_is_right():
    """Unbroken, rejection_with equals the product's rule: what is detected below is the break alone."""
    frame = decode(rejection_with(), SAMPLED, FILTERED, num_drafts=3, num_rows=2000)

    assert torch.equal(frame, decode(rejection_rule, SAMPLED, FILTERED, num_drafts=3, num_rows=2000))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_detected(name):
    rule, drafter, params = BROKEN[name]
    tokens = decode(rule, drafter, params, num_drafts=3, num_rows=NUM_ROWS)

    assert p_value(tokens, exact_joint(params)) < ALPHA
