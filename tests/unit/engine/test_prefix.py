"""Shared pages: keys, owners, and answers, drafts and acceptance as without sharing."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eyas import LLM
from eyas.core.sampling import SamplingParams
from eyas.engine.block_manager import BlockManager
from eyas.engine.prefix import extend_keys
from eyas.engine.request import Request
from eyas.engine.scheduler import Scheduler
from fakes import make_drafter
from tiny import tiny_target
from tree_fakes import tree_head

SALT = b"target drafter"


def keys_of(tokens, page_size, salt=SALT):
    keys = []
    extend_keys(keys, tokens, page_size, salt)
    return keys


@given(st.lists(st.integers(0, 2), max_size=14), st.lists(st.integers(0, 2), max_size=14), st.integers(1, 4))
def test_keys_are_equal_where_a_page_and_the_token_behind_it_are(first, second, page_size):
    a, b = keys_of(first, page_size), keys_of(second, page_size)
    assert len(a) == max(0, len(first) - 1) // page_size
    for index in range(min(len(a), len(b))):
        end = (index + 1) * page_size + 1
        assert (a[index] == b[index]) == (first[:end] == second[:end])


def test_keys_grow_and_depend_on_the_salt():
    tokens = list(range(20))
    keys = keys_of(tokens[:9], 4)
    assert len(keys) == 2
    extend_keys(keys, tokens, 4, SALT)
    assert keys == keys_of(tokens, 4)
    assert not set(keys) & set(keys_of(tokens, 4, b"another drafter"))


def test_kept_pages_go_least_recently_used_first_and_the_end_of_a_chain_before_its_beginning():
    blocks = BlockManager(6)
    first, second = blocks.allocate(2), blocks.allocate(2)
    for page, key in zip(first + second, (b"a", b"b", b"c", b"d"), strict=True):
        blocks.keep(page, key)
    blocks.free(first)
    blocks.free(second)
    assert (blocks.num_free, blocks.num_kept) == (5, 4)
    assert blocks.find([b"a", b"b", b"x"]) == first
    blocks.share(blocks.find([b"a"]))  # used again, and released last
    blocks.free([first[0]])
    assert blocks.allocate(1) == [5], "a page that holds nothing goes first"
    blocks.allocate(2)
    assert blocks.find([b"b"]) == []
    assert blocks.find([b"d"]) == []
    assert blocks.find([b"a"]) == [first[0]]
    assert blocks.find([b"c"]) == [second[0]]


def test_a_shared_page_is_free_when_its_last_owner_has_gone():
    blocks = BlockManager(4)
    pages = blocks.allocate(2)
    blocks.keep(pages[0], b"a")
    blocks.share([pages[0]])
    assert blocks.num_unowned(pages) == 0
    blocks.free(pages)
    assert blocks.num_free == 2
    blocks.check_integrity([[pages[0]]])
    blocks.free([pages[0]])
    assert blocks.num_free == 3
    assert blocks.num_unowned(pages) == 1


def test_dropped_pages_are_not_found_and_the_first_of_two_equals_is():
    blocks = BlockManager(6)
    pages = blocks.allocate(3)
    for page in pages[:2]:
        blocks.keep(page, b"a")
    assert blocks.find([b"a"]) == pages[:1]
    blocks.drop(pages)
    assert blocks.find([b"a"]) == []
    blocks.check_integrity([pages])


class SharingMachine(RuleBasedStateMachine):
    """Random arrivals with common beginnings, ends, aborts and faults, beside a model of what pages hold."""

    @initialize(
        pages=st.integers(10, 24),
        page_size=st.sampled_from([1, 2, 4]),
        seqs=st.integers(1, 4),
        drafts=st.integers(0, 4),
        chunk=st.integers(1, 9),
    )
    def start(self, pages, page_size, seqs, drafts, chunk):
        self.max_len, self.page_size, self.drafts = min(40, pages * page_size), page_size, drafts
        self.scheduler = Scheduler(
            BlockManager(pages + 1),
            page_size=page_size,
            max_num_seqs=seqs,
            max_len=self.max_len,
            lookahead=2 * drafts + 1,
            prefill_chunk=chunk,
            prefill_budget=2 * chunk,
            prefix_salt=SALT,
        )
        self.live, self.holds = [], {}

    @rule(seed=st.integers(0, 3), size=st.integers(1, 39))
    def arrive(self, seed, size):
        rng = random.Random(seed)
        common = [rng.randrange(2) for _ in range(40)]
        request = Request(
            request_id="r",
            prompt_ids=common[: min(size, self.max_len - 1)],
            params=SamplingParams(),
            seed=0,
            stop_ids=frozenset(),
            max_total=self.max_len,
        )
        self.scheduler.add(request)
        self.live.append(request)

    def write(self, request, start, end):
        """K and V of positions start .. end - 1, each with all that it depends on."""
        for position in range(start, end):
            page = request.pages[position // self.page_size]
            assert page not in self.scheduler.blocks._key_of, "a shared page is written to"
            for other in self.live:
                assert other is request or page not in other.pages
            self.holds[page, position % self.page_size] = tuple(request.token_ids[: position + 2])

    @rule(data=st.data())
    def step(self, data):
        plan = self.scheduler.schedule()
        begun = {id(chunk.request): chunk.start for chunk in plan.chunks}
        for request in plan.admitted:
            shared = begun.get(id(request), request.num_cached)
            assert shared % self.page_size == 0
            for position in range(shared):
                page = request.pages[position // self.page_size]
                held = self.holds[page, position % self.page_size]
                assert held == tuple(request.token_ids[: position + 2]), "found, and it is something else"
        for chunk in plan.chunks:
            self.write(chunk.request, chunk.start, chunk.end)
        for request in plan.decodes:
            before = request.num_cached
            kept = min(data.draw(st.integers(1, self.drafts + 1)), request.max_total - request.num_tokens)
            request.output_ids += [data.draw(st.integers(0, 1)) for _ in range(kept)]
            self.write(request, before, before + kept)
            request.num_cached += kept
            # Rejected drafts and the drafter's own guesses stand behind.
            for position in range(before + kept, min(before + 2 * self.drafts + 1, self.max_len)):
                page = request.pages[position // self.page_size]
                assert page not in self.scheduler.blocks._key_of
                self.holds[page, position % self.page_size] = None
            fate = data.draw(st.integers(0, 9))
            if fate == 1:
                request.error = "NaN"
                pages = list(request.pages)
            if request.num_tokens == request.max_total or fate < 2:
                self.scheduler.finish(request)
                self.live.remove(request)
            if fate == 1:
                assert not set(pages) & set(self.scheduler.blocks._key_of)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.live))
        self.scheduler.finish(request)
        self.live.remove(request)

    @rule()
    def a_step_fails(self):
        plan = self.scheduler.schedule()
        self.scheduler.distrust()
        for request in list(self.live):
            self.scheduler.finish(request)
        for chunk in plan.chunks:  # counted, and never written
            assert not chunk.request.pages
        self.live.clear()

    @invariant()
    def owners_are_counted_right(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "scheduler"):
            for request in list(self.live):
                self.scheduler.finish(request)
            self.scheduler.check_integrity()
            assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_pages - 1


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

# Engines.

P = 8
BASE = [1 + (7 * i) % 60 for i in range(60)]
PROMPTS = [
    BASE[:30],
    BASE[:30],  # the same again
    BASE[:50],  # longer
    BASE[:17],  # ends one token behind a page: both pages can be shared
    BASE[:16],  # ends with a page, whose last row needs a token that is not there yet
    [*BASE[:16], 63, 62, 61],  # goes on differently right behind a page
    [*BASE[:15], 63, 62, 61],  # and in its last position
    [*BASE[:8], 63],
    [63, *BASE[:20]],  # the same tokens elsewhere
]


class Recorded:
    """Logs what a drafter proposes."""

    def __init__(self, drafter):
        self.log, self._propose = [], drafter.propose
        drafter.propose = self

    def __call__(self, committed):
        draft = self._propose(committed)
        self.log.append(draft.tokens.tolist())
        return draft


def make(kind, *, caching, **options):
    target = tiny_target()
    drafter = None
    if kind == "tree":
        drafter = tree_head(target, "eagle3", "3x2x6")
    elif kind is not None:
        drafter = make_drafter(kind, target, 3, [])
    llm = LLM(target, drafter, page_size=P, max_num_seqs=4, prefix_caching=caching, **options)
    return llm, None if drafter is None else Recorded(drafter)


def one_by_one(kind, *, caching):
    """Ids, counters and drafts of each prompt, one after another, each conversation going on once."""
    llm, recorded = make(kind, caching=caching, prefill_chunk=11)
    results = []
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for prompt in PROMPTS:
        conversation = prompt
        for _ in range(2):
            (output,) = llm.generate([conversation], params)
            stats = output.stats
            counters = (stats.steps, stats.drafted, stats.accepted, stats.accepted_by_depth)
            results.append((output.outputs[0].token_ids, counters))
            conversation = [*conversation, *output.outputs[0].token_ids, 5, 6]
    return llm, results, [] if recorded is None else recorded.log


@pytest.mark.parametrize("kind", [None, "eagle3", "peagle", "self", "small_model", "prompt_lookup", "tree"])
def test_answers_drafts_and_acceptance_are_the_same(kind):
    fresh, want, drafts = one_by_one(kind, caching=False)
    cached, got, cached_drafts = one_by_one(kind, caching=True)
    assert got == want
    assert cached_drafts == drafts
    assert cached.stats.acceptance_length == fresh.stats.acceptance_length
    assert fresh.stats.prefix_hits == 0
    assert cached.stats.prefix_hits + cached.stats.prefill_tokens == fresh.stats.prefill_tokens
    assert cached.stats.prefix_hit_rate > 0.5
    assert cached.load().free_pages == cached.load().pages


def head_keys(caching):
    """Keys in the head's cache of a prompt that leaves another one right behind a page."""
    llm, _ = make("eagle3", caching=caching)
    llm.generate([BASE[:30]], SamplingParams(temperature=0.0, max_tokens=1))
    group = llm.new_intake().group([*BASE[:16], 63, 62, 61], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.submit(group)
    llm.step()
    (request,) = group.requests
    assert request.stats.cached_tokens == 0 or caching
    rows = llm.drafter._cache.keys[0][request.pages].flatten(0, 1)
    llm.abort(group.request_id)
    return rows[:18]


def test_the_last_row_of_a_page_needs_the_token_behind_it(monkeypatch):
    want = head_keys(caching=False)
    torch.testing.assert_close(head_keys(caching=True), want)

    def without_that_token(keys, token_ids, page_size, salt):
        for index in range(len(keys), (len(token_ids) - 1) // page_size):
            keys.append(repr(token_ids[: (index + 1) * page_size]).encode())

    monkeypatch.setattr("eyas.engine.scheduler.extend_keys", without_that_token)
    wrong = head_keys(caching=True)
    torch.testing.assert_close(wrong[:15], want[:15])
    assert not torch.allclose(wrong[15], want[15])


def test_what_a_request_found_is_reported():
    llm, _ = make(None, caching=True)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found = [llm.generate([prompt], params)[0].stats.cached_tokens for prompt in PROMPTS]
    assert found == [0, 24, 24, 16, 8, 8, 8, 0, 0]
    assert llm.stats.prefix_hits == sum(found)
    assert llm.stats.prefix_tokens == sum(len(prompt) - 1 for prompt in PROMPTS)


@pytest.mark.parametrize(("kind", "overlap"), [("eagle3", True), ("self", False), ("tree", True)])
def test_many_at_once_with_few_pages_and_random_aborts(kind, overlap):
    rng = random.Random(1)
    llm, _ = make(kind, caching=True, max_model_len=128, num_pages=17, overlap=overlap)
    plain = LLM(tiny_target(), page_size=P, max_num_seqs=1)
    known = {}
    intake = llm.new_intake()
    groups, waiting = [], []
    for number in range(24):
        prompt = rng.choice(PROMPTS)[: rng.randint(2, 60)]
        size = rng.choice([1, 9, 30])
        params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=2, max_tokens=size, ignore_eos=True)
        group = intake.group(prompt, params)
        group.request_id = str(number)
        waiting.append(group)
    while waiting or llm.load().running + llm.load().waiting:
        if waiting and rng.random() < 0.4:
            groups.append(waiting.pop())
            llm.submit(groups[-1])
        if rng.random() < 0.06 and groups:
            llm.abort(rng.choice(groups).request_id)
        llm.step()
    llm._runner.scheduler.check_integrity()
    assert llm.load().free_pages == llm.load().pages == 17
    assert llm.stats.prefix_hits > 100
    ended = [group.requests[0] for group in groups if group.requests[0].finish_reason == "length"]
    assert len(ended) > 12
    assert llm.stats.preemptions > 0 or kind == "self", "which is done too soon"
    for request in ended:
        key = (tuple(request.prompt_ids), request.params.temperature)
        if key not in known or len(known[key]) < len(request.output_ids):
            known[key] = plain.generate([request.prompt_ids], request.params)[0].outputs[0].token_ids
        assert request.output_ids == known[key][: len(request.output_ids)]


def test_a_request_that_fails_leaves_nothing_behind():
    llm, _ = make("eagle3", caching=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (want,) = llm.generate([BASE[:30]], params)
    llm, _ = make("eagle3", caching=True)
    weight = llm.target.decoder.embed_tokens.weight
    good = weight.data.clone()
    weight.data[BASE[3]] = float("nan")
    (bad,) = llm.generate([BASE[:30]], params)
    assert bad.outputs[0].finish_reason == "error"
    weight.data.copy_(good)
    (again,) = llm.generate([BASE[:30]], params)
    assert again.stats.cached_tokens == 0
    assert again.outputs[0].token_ids == want.outputs[0].token_ids


def test_a_step_that_raises_leaves_nothing_behind(monkeypatch):
    llm, _ = make(None, caching=True, prefill_chunk=16)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with monkeypatch.context() as patched:
        patched.setattr("eyas.engine.runner.prefill", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([BASE[:30]], params)
    (got,) = llm.generate([BASE[:30]], params)
    assert got.stats.cached_tokens == 0
    fresh, _ = make(None, caching=False)
    assert got.outputs[0].token_ids == fresh.generate([BASE[:30]], params)[0].outputs[0].token_ids
