"""check_lossless passes sound engines and drafters, and fails each that is broken on purpose."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch

import eyas.engine.step as step_module
from eyas.core.batch import Draft
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget
from eyas.drafters.small_model.propose import SmallModelDrafter
from eyas.engine.exact import OTHER, cell_of, next_logits, rounding_distance, token_tree
from eyas.engine.llm import LLM
from eyas.engine.sampler import choose
from eyas.engine.verify_check import CheckOptions, check_lossless, num_checks
from eyas.kernels.reference import step_settle
from eyas.kernels.reference.random import uniform
from eyas.targets.shapes import shape_target
from tiny import tiny_target
from tree_fakes import tree_head

V = 24
PROMPTS = [[1, 2, 3], [5, 6, 7, 8], [4] * 6]
OPTIONS = CheckOptions(num_draft_tokens=(3,), batch_sizes=(1, 3), num_tokens=14, samples=400)
TARGET = tiny_target(vocab_size=V, num_layers=2)
SMALL = copy.deepcopy(TARGET.decoder)
with torch.no_grad():
    for parameter in SMALL.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)


def small_model(num_drafts, *, sample_drafts=False):
    return SmallModelDrafter(
        SMALL,
        num_drafts,
        small_vocab_size=V,
        vocab_size=V,
        sample_drafts=sample_drafts,
        uniform=uniform,
    )


def sampling_small_model(num_drafts):
    return small_model(num_drafts, sample_drafts=True)


def verdicts(report):
    return {check.kind: check.passed for check in report.checks}


def test_sound_trees_pass():
    options = CheckOptions(
        num_draft_tokens=(), trees=(TreeBudget(3, 2, 6),), batch_sizes=(2,), num_tokens=14, samples=200
    )
    report = check_lossless(TARGET, lambda tree: tree_head(TARGET, "eagle3", str(tree)), PROMPTS, options)

    assert report.passed
    assert verdicts(report) == {"greedy": True, "seeded": True, "distribution": True}
    assert len(report.checks) == num_checks(options)
    assert {(check.tree, check.num_draft_tokens) for check in report.checks} == {("3x2x6", 6)}
    assert report.checks[0].acceptance_length > 1.0


def test_a_sound_drafter_passes():
    seen = []
    report = check_lossless(TARGET, small_model, PROMPTS, OPTIONS, progress=seen.append)

    assert report.passed
    assert verdicts(report) == {"greedy": True, "seeded": True, "distribution": True}
    assert seen == report.checks
    assert len(seen) == num_checks(OPTIONS)
    assert report.checks[0].acceptance_length > 1.2  # drafts were accepted: the check had something to find
    assert report.checks[0].tokens == 2 * 3 * 14


def test_engines_side_by_side_answer_as_one(monkeypatch):
    made = []
    whole = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda self, *a, **b: made.append(b) or whole(self, *a, **b))
    prompts = [*PROMPTS, [9, 9], [2]]
    options = replace(OPTIONS, samples=0, batch_sizes=(1, 2), plain_batches=True)
    alone = check_lossless(TARGET, small_model, prompts, options)
    one = len(made)
    several = check_lossless(TARGET, small_model, prompts, replace(options, engines=3))

    assert len(made) - one == 1 + 4 * 3  # the reference; plain, and K = 3, at two sizes
    assert {sizes["max_num_seqs"] for sizes in made[one:]} == {1, 2}
    assert several.checks == alone.checks
    assert [(check.kind, check.num_draft_tokens) for check in several.checks] == [
        ("greedy", 0),
        ("greedy", 3),
        ("seeded", 3),
    ]
    assert len(several.checks) == num_checks(options)
    assert several.checks[0].outputs == 5 * 2
    assert several.passed


def test_plain_decoding_that_depends_on_the_batch_fails(monkeypatch):
    whole = LLM.generate_ids

    def odd(self, prompts, params, progress=None):
        outputs = whole(self, prompts, params, progress)
        if len(prompts) == 1:
            outputs[0][5] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate_ids", odd)
    report = check_lossless(TARGET, small_model, PROMPTS, replace(OPTIONS, samples=0, plain_batches=True))

    assert not report.checks[0].passed
    assert report.checks[0].different == len(PROMPTS)


@pytest.mark.gpu
def test_streams_of_their_own_change_no_bit():
    target = shape_target("shape:smollm2-135m", device="cuda", dtype=None)
    made = random.Random(0)
    prompts = [[made.randrange(40000) for _ in range(made.randrange(3, 90))] for _ in range(12)]
    options = CheckOptions(
        num_draft_tokens=(4,), batch_sizes=(1, 4, 16), temperatures=(), num_tokens=96, samples=0, engines=4
    )
    report = check_lossless(target, "prompt_lookup", prompts, replace(options, plain_batches=True))

    assert report.passed, report.checks
    assert all(not check.differences for check in report.checks)


def test_sound_sampled_drafts_pass():
    options = CheckOptions(
        num_draft_tokens=(3,), batch_sizes=(3,), num_tokens=14, samples=400, sample_drafts=True
    )
    report = check_lossless(TARGET, sampling_small_model, PROMPTS, options)

    assert verdicts(report) == {"greedy": True, "distribution": True}
    assert len(report.checks) == num_checks(options)
    assert report.checks[1].acceptance_length > 1.2


def test_an_engine_that_accepts_everything_fails(monkeypatch):
    def accept_all(choices, drafts):
        return 1 + (drafts >= 0).long().cumprod(1).sum(1)

    monkeypatch.setattr(step_settle, "count_matches", accept_all)
    report = check_lossless(TARGET, small_model, PROMPTS, OPTIONS)

    assert not report.passed
    assert verdicts(report) == {"greedy": False, "seeded": False, "distribution": False}
    assert "DIFFER" in report.checks[0].detail


def test_an_engine_that_draws_rows_with_wrong_positions_fails(monkeypatch):
    """Right distribution, wrong key: only the comparison seed by seed can tell."""

    def elsewhere(logits, state, slots, drafts, position0, history, needs, tree):
        assert tree is None
        return choose(logits, state, slots, drafts, position0 + (drafts >= 0).any(1) * 1000, history, needs)

    monkeypatch.setattr(step_module, "choose", elsewhere)
    report = check_lossless(TARGET, small_model, PROMPTS, OPTIONS)

    assert verdicts(report) == {"greedy": True, "seeded": False, "distribution": True}


class Liar(SmallModelDrafter):
    """Draws from one distribution and reports another."""

    def propose(self, committed):
        draft = super().propose(committed)
        return Draft(draft.tokens, torch.full_like(draft.probs, 1 / V))


def test_a_drafter_that_lies_about_its_distribution_fails():
    options = CheckOptions(
        num_draft_tokens=(3,), batch_sizes=(3,), num_tokens=14, samples=400, sample_drafts=True
    )

    def liar(num_drafts):
        return Liar(SMALL, num_drafts, small_vocab_size=V, vocab_size=V, sample_drafts=True, uniform=uniform)

    assert verdicts(check_lossless(TARGET, liar, PROMPTS, options)) == {"greedy": True, "distribution": False}


def test_token_tree_is_the_enumerated_distribution():
    prompt = [3, 1, 4]
    cells = token_tree(TARGET, prompt, temperature=0.8, depth=2, num_top=3)

    first = (next_logits(TARGET, [prompt])[0] / 0.8).softmax(-1)
    second = (next_logits(TARGET, [[*prompt, token] for token in range(V)]) / 0.8).softmax(-1)
    sums = dict.fromkeys(cells, 0.0)
    for a, b in itertools.product(range(V), range(V)):
        sums[cell_of([a, b], cells)] += float(first[a] * second[a, b])
    assert sums.keys() == cells.keys()
    for cell, mass in cells.items():
        assert sums[cell] == pytest.approx(mass, abs=1e-6)
    assert sum(cells.values()) == pytest.approx(1.0)


def test_cell_example():
    cells = {(7, 3): 0.3, (7, OTHER): 0.3, (OTHER,): 0.4}

    assert [cell_of(tokens, cells) for tokens in ([7, 3], [7, 9], [2, 3])] == [(7, 3), (7, OTHER), (OTHER,)]


def test_rounding_distance():
    prompt = [2, 9]
    places = [
        rounding_distance(TARGET, prompt, (token, token), temperature=1.0, seed=4) for token in range(V)
    ]
    assert places.count(0.0) == 1
    chosen = places.index(0.0)
    assert max(places[:chosen] + places[chosen + 1 :]) > 0.01


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_draft_tokens": (0,)}, "num_draft_tokens"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"temperatures": (0.0,)}, "temperatures"),
        ({"samples": -1}, "samples"),
        ({"alpha": 0.0}, "alpha"),
        ({"engines": 0}, "engines"),
    ],
)
def test_bad_options_name_their_field(options, field):
    with pytest.raises(ConfigError, match=field):
        CheckOptions(**options)


def test_no_prompt_is_an_error():
    with pytest.raises(ConfigError, match="prompts"):
        check_lossless(TARGET, small_model, [])
