"""Faults that users of other engines met, one test for each kind; all of them fail on an engine that has it.

Each says what was seen there: speculation that skips or ignores sampling parameters, drafters that run past
their own context or give NaN, runs that do not repeat.
"""

import math
import random

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.drafters.small_model.propose import SmallModelDrafter
from eyas.engine.llm import LLM
from fakes import OracleDrafter, PieceTokenizer, make_drafter, random_head
from tiny import tiny_target

PROMPTS = [[9, 20, 31], [7, 7, 3, 7, 7], [40], [2, 5, 2, 5, 2, 5, 2]]


@pytest.fixture(scope="module")
def target():
    target = tiny_target(seed=3)
    target.tokenizer = PieceTokenizer()
    return target


def make(target, drafter=None, **options) -> LLM:
    return LLM(target, drafter, **{"max_model_len": 64, "page_size": 4, "max_num_seqs": 4, **options})


def said(llm: LLM, params) -> list[tuple]:
    outputs = llm.generate(PROMPTS, params)
    assert all(output.error is None for output in outputs)
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs]


EFFECTS = [
    ("top_k", {"temperature": 3.0, "top_k": 2}),
    ("top_p", {"temperature": 3.0, "top_p": 0.2}),
    ("min_p", {"temperature": 3.0, "min_p": 0.5}),
    ("repetition_penalty", {"temperature": 1.0, "repetition_penalty": 8.0}),
    ("presence_penalty", {"temperature": 1.0, "presence_penalty": 20.0}),
    ("frequency_penalty", {"temperature": 1.0, "frequency_penalty": 20.0}),
    ("logit_bias", {"temperature": 1.0, "logit_bias": {11: 30.0}}),
    ("min_tokens", {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": tuple(range(32))}),
    ("seed", {"temperature": 1.0, "seed": 8}),
]


@pytest.mark.parametrize(("field", "values"), EFFECTS, ids=[field for field, _ in EFFECTS])
def test_no_parameter_is_silently_ignored(target, field, values):
    """Penalties without effect under speculation; min-p and bias skipped by the rejection sampler."""
    base = {"max_tokens": 12, "ignore_eos": True, "seed": 5}
    with_it = SamplingParams(**{**base, **values})
    without = SamplingParams(**{**base, **{k: v for k, v in values.items() if k != field}})
    plain = make(target)
    expected = said(plain, with_it)
    assert said(plain, without) != expected, "this test could not notice that the field is ignored"
    answers = [prompt + tokens for prompt, (_, tokens, *_) in zip(PROMPTS, expected, strict=True)]
    oracle = OracleDrafter(5, answers, skill=0.8, vocab_size=64)
    llm = make(target, oracle)
    assert said(llm, with_it) == expected
    assert llm.stats.accepted > 0


def test_any_mixture_of_parameters_means_the_same_with_drafts(target):
    """One batch in which every request has its own mixture, against each request alone and undrafted."""
    rng = random.Random(4)
    choices = {
        "temperature": [0.0, 0.7, 2.0],
        "top_k": [0, 3, 64],
        "top_p": [1.0, 0.5],
        "min_p": [0.0, 0.1],
        "repetition_penalty": [1.0, 1.5],
        "presence_penalty": [0.0, 2.0],
        "frequency_penalty": [0.0, -1.0],
        "logit_bias": [{}, {3: 4.0, 9: -math.inf}],
        "min_tokens": [0, 6],
        "stop": [(), ("a", "bc")],
        "stop_token_ids": [(), (12, 30)],
        "logprobs": [None, 2],
        "n": [1, 2],
    }
    params = [
        SamplingParams(
            max_tokens=rng.choice([6, 14, 40]), seed=i, **{k: rng.choice(v) for k, v in choices.items()}
        )
        for i in range(10)
    ]
    prompts = [PROMPTS[i % 4] for i in range(10)]
    plain = make(target, max_num_seqs=1)
    expected = [plain.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    answers = [o.prompt_token_ids + c.token_ids for o in expected for c in o.outputs]
    # Few pages: requests are preempted and come back with drafts in flight.
    for kind in ("oracle", "self", "prompt_lookup"):
        llm = make(target, make_drafter(kind, target, 5, answers), num_pages=24)
        for one, two in zip(expected, llm.generate(prompts, params), strict=True):
            for a, b in zip(one.outputs, two.outputs, strict=True):
                assert (b.text, b.token_ids, b.finish_reason, b.stop_reason) == (
                    a.text,
                    a.token_ids,
                    a.finish_reason,
                    a.stop_reason,
                )
                assert len(b.origins) == len(b.token_ids)
                assert len(b.logprobs or b.token_ids) == len(b.token_ids)
        llm._runner.scheduler.check_integrity()
        assert kind == "prompt_lookup" or llm.stats.preemptions > 0


def test_a_small_model_whose_context_is_shorter_than_the_targets(target):
    """Rotary index past the end, illegal memory access: here the guesses get worse, nothing else."""
    small = tiny_target(seed=3, max_position_embeddings=16)
    drafter = SmallModelDrafter(small.decoder, 5, small_vocab_size=64, vocab_size=64)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    llm = make(target, drafter)
    assert said(llm, params) == said(make(target), params)
    assert llm.stats.accepted > 0


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_head_full_of_nan_costs_speed_alone(target, kind):
    """NaN drafts (uninitialised or overflown draft caches) must not reach the tokens or the next request."""
    head = random_head(target, kind, 3)
    with torch.no_grad():
        for parameter in head.model.parameters():
            parameter.fill_(math.nan)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert said(make(target, head), params) == said(make(target), params)


def test_a_run_repeats_itself_to_the_last_counter(target):
    """Same seed, same text, but acceptance that varied from run to run: logits were not stable."""
    params = [
        SamplingParams(temperature=t, max_tokens=20, seed=i) for i, t in enumerate((0.0, 1.0, 0.0, 0.7))
    ]
    runs = []
    for _ in range(2):
        llm = make(target, make_drafter("eagle3", target, 5, []), num_pages=40)
        outputs = llm.generate(PROMPTS, params)
        stats = llm.stats
        runs.append(([o.outputs[0].token_ids for o in outputs], stats.steps, stats.accepted, stats.runs))
    assert runs[0] == runs[1]


def test_acceptance_does_not_decay_as_an_engine_ages(target):
    """Acceptance that sank over hours until a restart: pages and rows of ended requests leak."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm = make(target, make_drafter("self", target, 5, []))
    lengths = []
    for _ in range(4):
        llm.stats.reset()
        llm.generate(PROMPTS, params)
        lengths.append(llm.stats.acceptance_length)
    assert len(set(lengths)) == 1
    assert lengths[0] >= 4
