"""Prefill in blocks, as graphs hold it, against the ragged one: K and V, and the tokens that follow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.core.sampling import SamplingParams
from eyas.drafters.prompt_lookup.propose import PromptLookupDrafter
from eyas.engine.llm import LLM
from eyas.engine.prefill import cut, prefill_blocks
from eyas.engine.prefill_graphs import BLOCK_ROWS, MOST_BLOCKS, blocks_bound, pieces
from eyas.engine.request import Request
from eyas.engine.scheduler import Chunk
from eyas.kernels.triton.paged_attention_plan import MOST_ROTATED
from fakes import FeatureSpy, naive_greedy, random_head, small_model
from replayed import with_graphs, with_prefill_graphs
from tiny import tiny_target
from tree_fakes import tree_head

DRAFTERS = {
    "plain": lambda target: None,
    "prompt_lookup": lambda target: PromptLookupDrafter(3),
    "eagle3": lambda target: random_head(target, "eagle3", 3),
    "peagle": lambda target: random_head(target, "peagle", 3),
    "eagle3 tree": lambda target: tree_head(target, "eagle3", "3x2x6"),
    "peagle tree": lambda target: tree_head(target, "peagle", "3x2x6"),
    "small_model": lambda target: small_model(target, 3),
    "sampled": lambda target: small_model(target, 3, sample=True),
}
# Shorter and longer than a block, whole blocks, one token.
PROMPTS = [[3, 4, 5], [7], list(range(1, 20)), [9] * 9, [60, 50, 40, 30, 20], [60, 50, 40, 30, 20, 10]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def answers():
    """What whole forwards give."""
    target = tiny_target()
    return [naive_greedy(target, prompt, 20) for prompt in PROMPTS]


def make(target, kind, **options) -> LLM:
    options = {"max_model_len": 64, "page_size": 4, "max_num_seqs": 3, **options}
    return LLM(target, DRAFTERS[kind](target), **options)


def caches(llm: LLM):
    """Keys and values of target and drafter, without the scratch page."""
    drafter = llm.drafter
    found = [llm._runner.models.cache, None if drafter is None else getattr(drafter, "_cache", None)]
    return [page[1:] for cache in found if cache is not None for page in (*cache.keys, *cache.values)]


@pytest.mark.parametrize(
    ("lengths", "rows", "blocks"),
    [
        ([(0, 3), (8, 10)], 2, [(0, 0, 2), (0, 2, 1), (1, 8, 2)]),
        ([(5, 6)], 4, [(0, 5, 1)]),
        ([(0, 8)], 4, [(0, 0, 4), (0, 4, 4)]),
    ],
)
def test_cut(lengths, rows, blocks):
    chunks = []
    for slot, (start, end) in enumerate(lengths):
        request = Request("a", [1], PARAMS, seed=0, stop_ids=frozenset(), max_total=9, slot=slot)
        chunks.append(Chunk(request, start, end))
    assert cut(chunks, rows) == blocks


@pytest.mark.parametrize(
    ("num_blocks", "most", "sizes"),
    [
        (1, 64, [1]),
        (3, 64, [4]),
        (5, 32, [8]),
        (10, 32, [8, 2]),
        (13, 32, [16]),
        (33, 32, [32, 1]),
        (70, 32, [32, 32, 8]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_pieces(num_blocks, most, sizes):
    assert pieces(num_blocks, most) == sizes


@given(st.integers(1, 500), st.sampled_from([1, 2, 8, 64]))
def test_pieces_hold_all_blocks_with_little_padding(num_blocks, most):
    sizes = pieces(num_blocks, most)
    assert all(size <= most and size & (size - 1) == 0 for size in sizes)
    assert sum(sizes[:-1]) < num_blocks <= sum(sizes)
    assert sum(sizes) - num_blocks <= max(most // 4, 3)
    assert len(sizes) <= num_blocks // most + 7


def test_bounds():
    assert [blocks_bound(seen) for seen in (1, 1024, 1025, 5000)] == [1024, 1024, 4096, 16384]


def test_a_block_is_more_than_attention_caches_itself():
    """Else a block would read rows that another program is writing."""
    assert BLOCK_ROWS > MOST_ROTATED


PARTS = {"prefill_chunk": 5, "prefill_budget": 11}


@pytest.mark.parametrize(("kind", "options"), [*[(kind, PARTS) for kind in DRAFTERS], ("eagle3", {})])
def test_blocks_write_what_ragged_rows_write(kind, options, answers):
    """Parts begin and end inside pages and blocks, and several requests are prefilled together."""
    target = tiny_target()
    ragged, blocked = make(target, kind, **options), make(target, kind, **options)
    graphs = with_prefill_graphs(blocked, rows=4, most_blocks=4)
    expected = ragged.generate_ids(PROMPTS, PARAMS)

    assert blocked.generate_ids(PROMPTS, PARAMS) == expected
    if kind != "sampled":
        assert expected == [answer[:6] for answer in answers]
    for one, other in zip(caches(ragged), caches(blocked), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert blocked.stats.prefill_tokens == ragged.stats.prefill_tokens
    assert blocked.stats.acceptance_length == ragged.stats.acceptance_length
    assert {1, 2, 4} >= {size for size, _ in graphs._captured}
    assert all(entry.graph.num_replays > 0 for entry in graphs._captured.values())


@pytest.mark.parametrize(("family", "rows"), [("mistral", 1), ("mistral", 8), ("mistral", 64), ("qwen3", 2)])
def test_rows_of_a_block_change_nothing(family, rows):
    """With a sliding window shorter than some blocks, and with normed queries and keys."""
    target = tiny_target(family)
    ragged, blocked = make(target, "peagle"), make(target, "peagle")
    with_prefill_graphs(blocked, rows=rows)

    assert blocked.generate_ids(PROMPTS, PARAMS) == ragged.generate_ids(PROMPTS, PARAMS)
    for one, other in zip(caches(ragged), caches(blocked), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["small_model", "peagle tree"])
def test_a_shared_beginning_is_not_touched(kind):
    target = tiny_target()
    prompts = [list(range(1, 24)), [*range(1, 18), 50, 51, 52, 53, 54, 55], list(range(1, 10))]
    outputs = []
    for blocks in (False, True):
        llm = make(target, kind, prefix_caching=True)
        if blocks:
            with_prefill_graphs(llm, rows=4)
        outputs.append([llm.generate_ids([prompt], PARAMS) for prompt in prompts])
        assert llm.stats.prefix_hits > 16
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rows", [3, 64])
def test_the_drafters_rows_are_right(rows, answers):
    """Tokens and features of every real row, against whole forwards."""
    target = tiny_target()
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    spy = FeatureSpy(target, 3, texts, skill=0.7)
    llm = LLM(target, spy, max_model_len=64, page_size=4, max_num_seqs=3, prefill_chunk=7)
    with_prefill_graphs(llm, rows=rows)
    assert llm.generate_ids(PROMPTS, PARAMS) == [answer[:6] for answer in answers]
    assert spy.num_rows >= sum(len(prompt) - 1 for prompt in PROMPTS)


@pytest.mark.parametrize("kind", ["eagle3", "small_model"])
def test_with_steps_in_flight_pages_short_and_requests_aborted(kind, answers):
    """Preempted requests are prefilled again, beside others, while a step is in flight."""
    target = tiny_target()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm = make(target, kind, num_pages=16, prefill_chunk=6, prefill_budget=12, overlap=True)
    with_graphs(llm)
    with_prefill_graphs(llm, rows=4, most_blocks=2)
    stream = llm.stream(PROMPTS[2], params)
    next(stream)
    stream.close()
    running = llm.iterate_ids(PROMPTS, params)
    next(running)
    running.close()
    assert llm.generate_ids(PROMPTS, params) == answers
    assert llm.stats.preemptions > 0


def test_padding_touches_nothing_but_the_scratch_page():
    target = tiny_target()
    for kind in ("small_model", "peagle"):
        llm = make(target, kind)
        llm.generate_ids(PROMPTS[:3], PARAMS)
        before = [one.clone() for one in caches(llm)]
        runner = llm._runner
        history = runner.state.history.clone()
        padding = torch.tensor([[runner.state.num_slots] * 2, [0, 0], [0, 0]])
        with torch.no_grad():
            prefill_blocks(runner.models, runner.state, padding, 4, 1024)
        assert all(torch.equal(one, other) for one, other in zip(before, caches(llm), strict=True))
        assert torch.equal(history, runner.state.history)


def test_warming_captures_what_runs():
    target = tiny_target()
    llm = make(target, "eagle3")
    with_graphs(llm)
    graphs = with_prefill_graphs(llm, rows=4, most_blocks=4)
    calls = []
    llm._runner.warm(lambda done, total: calls.append((done, total)))
    captured = set(graphs._captured)
    assert captured == {(1, 1024), (2, 1024), (4, 1024)}
    assert calls[0] == (0, calls[-1][1])
    assert calls[-1][0] == calls[-1][1] == len(calls) - 1
    llm.generate_ids(PROMPTS, PARAMS)
    assert set(graphs._captured) == captured


def test_contexts_share_few_bounds():
    target = tiny_target(max_position_embeddings=9000)
    llm = LLM(target, None, max_model_len=8192, num_pages=40)
    graphs = with_prefill_graphs(llm, rows=BLOCK_ROWS, most_blocks=1000)
    assert graphs.most_blocks == MOST_BLOCKS
    assert len(graphs.to_warm()) == 7 * 3
    assert len(graphs.to_warm(1500)) == 7 * 2


def test_prefill_alone_is_warmed():
    llm = make(tiny_target(), "plain")
    llm.warm_prefill(64)  # without graphs there is nothing to do
    graphs = with_prefill_graphs(llm, rows=4, most_blocks=2)
    llm.warm_prefill(9000)
    assert set(graphs._captured) == {(1, 1024), (2, 1024)}
