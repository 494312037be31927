"""Every processor against a plain loop over one row, and against transformers where semantics coincide."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import naive_sampling
from eyas.core.sampling import SamplingParams
from eyas.engine import logits_processors
from eyas.engine.logits_processors import count_drafts, filter_tokens, token_counts
from eyas.engine.sampler import Needs, SamplingState, needs_of, process_logits, target_probs

V = 12
EOS = 3

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 3, 7, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-math.inf, -2.0, 3.5]), max_size=4),
    min_tokens=st.sampled_from([0, 2, 4]),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=3),
    ignore_eos=st.booleans(),
)


def prefix_of(drafts, row):
    return [token for token in drafts[:row] if token >= 0]


@settings(deadline=None, max_examples=150)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**32), st.integers(0, 3))
def test_whole_pipeline_equals_naive(params, seed, num_drafts):
    """Requests of different parameters in one batch, rows seeing their drafted prefix."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(params)
    state = SamplingState(6, V, eos_token_ids=(EOS,))
    slots = torch.randperm(6, generator=generator)[:batch]
    history = torch.randint(0, V, (7, 20), generator=generator)
    num_prompt = torch.randint(1, 6, (batch,), generator=generator)
    position0 = num_prompt + torch.randint(0, 5, (batch,), generator=generator)
    drafts = torch.randint(-1, V, (batch, num_drafts), generator=generator)
    logits = torch.randn(batch, num_drafts + 1, V, generator=generator) * 3
    needs = Needs.GREEDY
    for b, p in enumerate(params):
        state.set_row(int(slots[b]), p, num_prompt_tokens=int(num_prompt[b]), seed=b)
        needs |= needs_of(p)

    probs, bad = target_probs(logits, state, slots, drafts, position0, history, needs)

    for b, p in enumerate(params):
        known = history[slots[b], : position0[b]].tolist()
        prompt, output = known[: num_prompt[b]], known[num_prompt[b] :]
        stops = {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
        for row in range(num_drafts + 1):
            # A row behind "no draft" is never used, but must be defined: -1 counts as no token.
            seen = prefix_of(drafts[b].tolist(), row)
            if len(seen) < row:
                continue
            shaped = naive_sampling.shape(logits[b, row].tolist(), p, prompt, output + seen, stops)
            if max(shaped) == -math.inf:
                assert bad[b, row]
                continue
            expected = naive_sampling.target_probs(logits[b, row].tolist(), p, prompt, output + seen, stops)
            assert not bad[b, row]
            torch.testing.assert_close(probs[b, row], torch.tensor(expected), atol=2e-5, rtol=0)


def filtered(logits, *, min_p=0.0, top_k=None, top_p=1.0):
    return filter_tokens(
        logits.view(1, 1, -1),
        min_p=torch.tensor([min_p]),
        top_k=torch.tensor([top_k or logits.numel()]),
        top_p=torch.tensor([top_p]),
    ).view(-1)


@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.5, 0.9, 0.999]), st.sampled_from([1, 2, 9, 40]))
def test_filters_equal_transformers(seed, share, k):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 3

    pairs = [
        (filtered(logits, min_p=share), MinPLogitsWarper(share)),
        (filtered(logits, top_k=k), TopKLogitsWarper(k)),
        (filtered(logits, top_p=share), TopPLogitsWarper(share)),
    ]

    for ours, theirs in pairs:
        assert torch.equal(ours, theirs(None, logits.view(1, -1)).view(-1))


@given(st.integers(0, 2**32), st.sampled_from([0.7, 1.0, 1.5]))
def test_repetition_penalty_equals_transformers(seed, penalty):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 1, V, generator=generator)
    history = torch.randint(0, V, (2, 9), generator=generator)
    state = SamplingState(1, V)
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    state.set_row(0, params, num_prompt_tokens=4, seed=0)
    none = torch.zeros(1, 0, dtype=torch.int64)

    ours = process_logits(logits, state, torch.tensor([0]), none, torch.tensor([7]), history, Needs.SHAPE)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(history[:1, :7], logits[:, 0])

    torch.testing.assert_close(ours[:, 0], theirs)


def test_filter_examples():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()

    def kept(**options):
        return filtered(logits, **options).isfinite().tolist()

    # The cumulative sum of .4 and .3 is .7 up to float32, so the examples stay off the edge.
    assert kept(top_p=0.69) == [True, True, False, False]
    assert kept(top_p=0.71) == [True, True, True, False]
    assert kept(top_k=2, top_p=0.5) == [True, False, False, False]
    assert kept(top_p=1e-9) == [True, False, False, False]
    assert kept(min_p=0.6) == [True, True, False, False]


def test_ties():
    """Top-k keeps all that tie with the k-th; top-p breaks ties by the lower id."""
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])

    assert filtered(logits, top_k=2).isfinite().tolist() == [False, True, True, True, False]
    assert filtered(logits, top_p=0.4).isfinite().tolist() == [False, True, True, False, False]


def test_top_p_one_keeps_a_tail_that_rounds_away():
    logits = torch.tensor([0.0, -60.0, -80.0])

    assert filtered(logits, top_p=1.0).isfinite().all()


def test_tiny_temperature_does_not_overflow():
    state = SamplingState(1, 3)
    params = SamplingParams(temperature=1e-37)
    state.set_row(0, params, num_prompt_tokens=1, seed=0)
    logits = torch.tensor([[[5.0, 400.0, 399.0]]])
    none = torch.zeros(1, 0, dtype=torch.int64)
    args = (state, torch.tensor([0]), none, torch.tensor([1]), torch.zeros(2, 4, dtype=torch.int64))

    probs, bad = target_probs(logits, *args, needs_of(params))

    assert probs.tolist() == [[[0.0, 1.0, 0.0]]]
    assert not bad.any()


def test_count_examples():
    history = torch.tensor([[2, 2, 3, 0]])
    counts = token_counts(history, torch.tensor([0]), torch.tensor([3]), 4)
    rows = count_drafts(torch.tensor([[1, 0, 0]], dtype=torch.int32), torch.tensor([[2, 0]]))

    assert counts.tolist() == [[0, 0, 2, 1]]
    assert rows.tolist() == [[[1, 0, 0], [1, 0, 1], [2, 0, 1]]]


def test_history_beyond_the_known_tokens_is_ignored():
    """Rejected drafts stay behind in the history; they were never generated."""
    history = torch.tensor([[1, 1, 7, 7, 7]])

    counts = token_counts(history, torch.tensor([1]), torch.tensor([2]), 8)

    assert counts.tolist() == [[0, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("prompt_tokens", [2, 5])
def test_resumed_request_keeps_its_prompt_length(prompt_tokens):
    """Presence penalty falls on output alone, wherever the history says that output begins."""
    state = SamplingState(1, V)
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    state.set_row(0, params, num_prompt_tokens=prompt_tokens, seed=0)
    history = torch.arange(10).repeat(2, 1)
    none = torch.zeros(1, 0, dtype=torch.int64)
    zeros = torch.zeros(1, 1, V)

    out = process_logits(zeros, state, torch.tensor([0]), none, torch.tensor([7]), history, Needs.SHAPE)

    expected = [-1.0 if prompt_tokens <= token < 7 else 0.0 for token in range(V)]
    assert out.view(-1).tolist() == expected


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([1, 7, 8, 9, 60]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_the_short_way_on_the_cpu_equals_the_sort(seed, top_p, top_k, min_p, ties):
    """Where the likeliest 8 of 60 tokens are enough, and where they are not (ties, wide nuclei)."""
    logits = torch.randn(2, 3, 60, generator=torch.Generator().manual_seed(seed)) * 3
    if ties:
        logits = logits.round()
    options = {
        "min_p": torch.tensor([min_p, 0.0]),
        "top_k": torch.tensor([top_k, 60]),
        "top_p": torch.tensor([top_p, 0.3]),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits_processors, "HEAD", 8)
        short = filter_tokens(logits, **options)
        patch.setattr(logits_processors, "HEAD", 60)
        whole = filter_tokens(logits, **options)

    assert torch.equal(short, whole)


def test_the_short_way_is_taken(monkeypatch):
    monkeypatch.setattr(logits_processors, "HEAD", 8)
    monkeypatch.setattr(logits_processors, "_keep_by_sort", None)
    logits = -torch.arange(60.0)

    assert filtered(logits, top_p=0.9).isfinite().sum() == 3
    assert filtered(logits, top_k=8).isfinite().sum() == 8
    with pytest.raises(TypeError):
        filtered(logits, top_k=9)


def test_the_short_way_keeps_bad_rows_bad(monkeypatch):
    monkeypatch.setattr(logits_processors, "HEAD", 8)
    logits = torch.randn(60)
    logits[5] = float("nan")

    assert filtered(logits, top_p=0.5).isnan().any()
