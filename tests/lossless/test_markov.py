"""Chains that hear the guess before, both forms: the target's tokens at T = 0, its distribution at T > 0."""

from dataclasses import replace

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from eyas.verify.chi_square import chi_square
from fakes import full_forward, naive_greedy, random_head
from tiny import tiny_target

FORMS = pytest.mark.parametrize("form", ["tables", "hidden"])
PROMPT, TOP_K, NUM_TOKENS, NUM_ROWS = [9, 3, 17], 4, 3, 1500
ALPHA = 1e-3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def decode(target, drafter, prompts, params):
    llm = LLM(target, drafter, max_model_len=80, page_size=4, num_pages=600, max_num_seqs=64)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def prompts(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (1, 2, 19, 33)[:count]]


@FORMS
@pytest.mark.parametrize("num_drafts", [1, 7])
@pytest.mark.parametrize("sample", [False, True])
def test_greedy_tokens_are_the_target_s(target, form, num_drafts, sample):
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens = decode(target, random_head(target, form, num_drafts, sample=sample), prompts(4), greedy)
    assert tokens == [naive_greedy(target, prompt, 16) for prompt in prompts(4)]


@FORMS
def test_point_masses_change_no_sampled_token(target, form):
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]
    plain = decode(target, None, prompts(4), params)
    assert decode(target, random_head(target, form, 4), prompts(4), params) == plain


def exact(target, params):
    """Probability of every run of tokens that top-k leaves, by enumeration."""
    cells = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for run, mass in cells.items():
            logits, _ = full_forward(target, [*PROMPT, *run])
            values, ids = (logits[-1] / params.temperature).topk(TOP_K)
            for token, p in zip(ids.tolist(), values.double().softmax(-1).tolist(), strict=True):
                longer[*run, token] = mass * p
        cells = longer
    return cells


@FORMS
def test_sampled_chains_keep_the_target_s_distribution(target, form):
    params = SamplingParams(temperature=1.2, top_k=TOP_K, max_tokens=NUM_TOKENS, ignore_eos=True)
    seeds = [replace(params, seed=seed) for seed in range(NUM_ROWS)]
    found = decode(target, random_head(target, form, 2, sample=True), [PROMPT] * NUM_ROWS, seeds)
    cells = exact(target, params)
    counts = dict.fromkeys(cells, 0)
    for tokens in found:
        counts[tuple(tokens)] += 1
    result = chi_square(list(counts.values()), list(cells.values()))
    assert result.degrees > 20
    assert result.p_value > ALPHA
