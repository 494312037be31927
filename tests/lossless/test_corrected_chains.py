"""Chains that hear the guess before, both forms: the target's tokens at T = 0, its distribution at T > 0."""

from dataclasses import replace

import pytest
import torch

from eyas.core.sampling import SamplingParams
from eyas.engine.llm import LLM
from eyas.nn.packed import PackedContext
from eyas.verify.chi_square import chi_square
from fakes import naive_greedy, random_head
from tiny import tiny_target

FORMS = pytest.mark.parametrize("form", ["tables", "hidden"])
PROMPT, TEMPERATURE, NUM_ROWS = [9, 3, 17], 2.0, 2000
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


def last_pairs(target, temperature):
    """Probability of each (second, third) token, over all first ones: float64 [64, 64]."""
    before, mass = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for place in range(3):
        context = PackedContext.of(torch.zeros_like(before))
        positions = torch.arange(before.shape[1]).expand_as(before)
        hidden, _ = target.decoder(before, positions, context)
        logits = target.decoder.logits(hidden[:, -1]).double()
        runs = mass[:, None] * (logits / temperature).softmax(-1)
        if place < 2:
            mass, tokens = runs.flatten(), torch.arange(64).repeat(len(before))
            before = torch.cat((before.repeat_interleave(64, 0), tokens[:, None]), 1)
    return runs.view(64, 64, 64).sum(0)


def cells_of(drafter, num_cells=24):
    """A cell of each (second, third) token, int64 [64, 64]: by how much the one speaks for the other."""
    table, out = drafter._correction.get()
    known = drafter.vocab_map.draft_ids(torch.arange(64)).clamp(min=0)
    push = (torch.nn.functional.silu(table) @ out.T)[known][:, known]
    return push.flatten().argsort().argsort().view(64, 64) * num_cells // 64**2


@FORMS
def test_sampled_chains_keep_the_target_s_distribution(target, form):
    """The first token has no draft; the third one's is the first that heard another.

    Which pairs a wrong q would favour is what the correction says, so that is how they are told apart.
    """
    drafter = random_head(target, form, 2, sample=True)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=3, ignore_eos=True)
    seeds = [replace(params, seed=seed) for seed in range(NUM_ROWS)]
    found = torch.tensor(decode(target, drafter, [PROMPT] * NUM_ROWS, seeds))
    cells, pairs = cells_of(drafter), last_pairs(target, TEMPERATURE)
    counts = torch.bincount(cells[found[:, 1], found[:, 2]], minlength=24)
    wanted = torch.zeros(24, dtype=torch.float64).index_add(0, cells.flatten(), pairs.flatten())
    result = chi_square(counts.tolist(), wanted.tolist())
    assert result.degrees > 15
    assert result.p_value > ALPHA
