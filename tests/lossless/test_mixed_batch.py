"""One batch of requests that differ in all they may: drafts, lengths of prompt and answer, sampling."""

from dataclasses import replace

import pytest
from test_greedy import prompts

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from fakes import make_drafter
from tiny import tiny_target

LIMITS = (None, 1, 0, 2, 0, 3, None, 1)
"""Drafts a step that each of the eight requests allows; None: what the engine has, 4."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
KINDS = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, ignore_eos=True),
    replace(GREEDY, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2, ignore_eos=True),
)
PARAMS = [
    replace(KINDS[i % 4], num_draft_tokens=limit, max_tokens=14 + 2 * i) for i, limit in enumerate(LIMITS)
]


@pytest.fixture(scope="module")
def world():
    """A target, and what each request says alone and without any drafter."""
    target = tiny_target()
    plain = LLM(target, None, max_model_len=80, page_size=4, num_pages=200)
    alone = [
        plain.generate([prompt], replace(params, num_draft_tokens=None))[0].outputs[0].token_ids
        for prompt, params in zip(prompts(), PARAMS, strict=True)
    ]
    return target, alone


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "prompt_lookup", "small_model", "self"])
def test_drafted_and_undrafted_requests_share_a_batch(world, kind):
    target, alone = world
    llm = LLM(
        target,
        make_drafter(kind, target, 4, []),
        max_model_len=80,
        page_size=4,
        num_pages=200,
        max_num_seqs=8,
    )
    outputs = llm.generate(prompts(), PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert llm.stats.steps < sum(output.stats.steps for output in outputs)  # they did share steps
    for output, limit in zip(outputs, LIMITS, strict=True):
        own = output.stats
        most = 4 if limit is None else limit
        assert own.drafted <= most * own.draft_steps
        assert not any(own.accepted_by_depth[most:])
        if most == 0:
            assert own.draft_steps == own.drafted == 0
        elif kind != "prompt_lookup":
            assert own.drafted > 0
    if kind == "self":
        # Both greedy, the drafter always right: what is allowed decides.
        assert outputs[4].stats.acceptance_length == 1.0
        assert outputs[0].stats.acceptance_length > 4.0
