"""Admission, chunks, growth and preemption as arithmetic."""

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eyas.core.sampling import SamplingParams
from eyas.engine.block_manager import BlockManager
from eyas.engine.request import Request
from eyas.engine.scheduler import Plan, Scheduler


def make_request(num_tokens: int, name: str = "r", max_total: int = 1000) -> Request:
    return Request(
        request_id=name,
        prompt_ids=list(range(num_tokens)),
        params=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        max_total=max_total,
    )


def make_scheduler(num_pages: int = 100, **options: int) -> Scheduler:
    options = {
        "page_size": 4,
        "max_num_seqs": 4,
        "max_len": 40,
        "lookahead": 7,
        "prefill_chunk": 8,
        "prefill_budget": 16,
        **options,
    }
    return Scheduler(BlockManager(num_pages + 1), **options)


def commit(request: Request, num_tokens: int) -> None:
    """What the runner does after a step."""
    request.output_ids += [0] * num_tokens
    request.num_cached += num_tokens


def spans(plan: Plan) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


def test_no_torch_is_imported():
    code = (
        "import sys, eyas.engine.scheduler, eyas.engine.block_manager, eyas.engine.request;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_but_the_last_token_are_prefilled_and_the_request_decodes_in_the_same_step():
    scheduler = make_scheduler()
    request = make_request(6)
    scheduler.add(request)

    plan = scheduler.schedule()

    assert spans(plan) == [("r", 0, 5)]
    assert plan.admitted == plan.decodes == [request]
    # Positions 5 .. 11 may be written by the first step: 12 positions, 3 pages.
    assert len(request.pages) == 3


def test_a_prompt_of_one_token_needs_no_prefill():
    scheduler = make_scheduler()
    scheduler.add(make_request(1))

    plan = scheduler.schedule()

    assert plan.chunks == []
    assert len(plan.decodes) == 1


def test_long_prompts_come_in_chunks_within_the_budget():
    scheduler = make_scheduler()
    for name, size in (("a", 20), ("b", 12), ("c", 3)):
        scheduler.add(make_request(size, name))

    first, second, third = scheduler.schedule(), scheduler.schedule(), scheduler.schedule()

    assert spans(first) == [("a", 0, 8), ("b", 0, 8)]
    assert first.decodes == []
    assert spans(second) == [("a", 8, 16), ("b", 8, 11), ("c", 0, 2)]
    assert [request.request_id for request in second.decodes] == ["b", "c"]
    assert spans(third) == [("a", 16, 19)]
    assert [request.request_id for request in third.decodes] == ["a", "b", "c"]


def test_a_long_prompt_holds_decoding_requests_up_by_one_chunk_a_step():
    scheduler = make_scheduler(max_len=400, num_pages=200)
    decoding, long = make_request(3, "decoding"), make_request(201, "long")
    scheduler.add(decoding)
    scheduler.schedule()
    commit(decoding, 1)
    scheduler.add(long)

    for step in range(25):
        plan = scheduler.schedule()
        assert spans(plan) == [("long", 8 * step, 8 * step + 8)]
        assert decoding in plan.decodes
        commit(decoding, 1)
    assert plan.decodes == [decoding, long]


def test_first_come_first_served_even_if_a_later_one_would_fit():
    scheduler = make_scheduler(num_pages=10)
    big, small = make_request(30, "big"), make_request(2, "small")
    holder = make_request(5, "holder")
    for request in (holder, big, small):
        scheduler.add(request)

    plan = scheduler.schedule()

    assert [request.request_id for request in plan.admitted] == ["holder"]
    scheduler.finish(holder)
    assert scheduler.schedule().admitted[0] is big


def test_rows_run_out():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(2, str(i)) for i in range(3)]
    for request in requests:
        scheduler.add(request)

    assert scheduler.schedule().admitted == requests[:2]
    assert {request.slot for request in requests[:2]} == {0, 1}
    scheduler.finish(requests[0])
    assert scheduler.schedule().admitted == requests[2:]
    assert requests[2].slot == 0


def test_growth_is_reported_page_by_page_and_ends_at_the_context_limit():
    scheduler = make_scheduler(num_pages=15)  # too few to take more than one step needs
    request = make_request(6)
    scheduler.add(request)
    scheduler.schedule()

    commit(request, 4)
    plan = scheduler.schedule()

    # 9 cached, positions 9 .. 15: a fourth page.
    assert plan.grown == [(request.slot, 3, request.pages[3])]
    commit(request, 1)
    assert len(scheduler.schedule().grown) == 1
    commit(request, 28)
    scheduler.schedule()
    assert len(request.pages) == 10


def test_where_pages_are_plenty_all_requests_get_those_of_many_steps_at_once():
    scheduler = make_scheduler(num_pages=600, max_len=400)
    requests = [make_request(6, "a"), make_request(7, "b", max_total=20)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    for request in requests:
        commit(request, 4)
    grown = scheduler.schedule().grown

    # 9 cached and 64 to come, then 7 behind: 80 positions. The other ends at 20 tokens.
    assert [len(request.pages) for request in requests] == [20, 7]
    assert sorted(grown) == [
        (r.slot, i, r.pages[i]) for r in requests for i in range(3 + (r.slot == 1), len(r.pages))
    ]
    for _ in range(16):
        commit(requests[0], 4)
        assert scheduler.schedule().grown == []
    commit(requests[0], 1)
    assert len(scheduler.schedule().grown) == 17
    for request in requests:
        scheduler.finish(request)
    scheduler.check_integrity()


def test_the_newest_is_preempted_and_comes_back_first_with_its_output_to_prefill():
    scheduler = make_scheduler(num_pages=10)
    old, new, waiting = (make_request(5, name) for name in ("old", "new", "waiting"))
    for request in (old, new):
        scheduler.add(request)
    scheduler.schedule()
    scheduler.add(waiting)
    preempted: list[Request] = []
    for _ in range(6):
        plan = scheduler.schedule()
        preempted += plan.preempted
        if plan.preempted:
            break
        for request in plan.decodes:
            commit(request, 4)
    assert preempted == [new]
    assert plan.decodes == [old]
    assert (new.slot, new.pages, new.num_cached) == (-1, [], 0)
    assert [request.request_id for request in scheduler.waiting] == ["new", "waiting"]
    scheduler.finish(old)

    plan = scheduler.schedule()

    assert plan.admitted[0] is new
    assert spans(plan)[0] == ("new", 0, 8)
    assert new.num_tokens > 9


def test_a_preempted_requests_pages_are_not_reported_as_grown():
    """Its slot may belong to somebody else by the time the entry would be written."""
    scheduler = make_scheduler(num_pages=10, lookahead=1)
    old, new = make_request(5, "old"), make_request(5, "new")
    scheduler.add(old)
    scheduler.add(new)
    scheduler.schedule()
    for _ in range(20):
        commit(old, 1)
        commit(new, 1)
        plan = scheduler.schedule()
        if plan.preempted:
            break
    assert plan.preempted == [new]
    assert all(slot == old.slot for slot, _, _ in plan.grown)


def test_abort_frees_a_waiting_and_a_running_request():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_request(6, "running"), make_request(6, "waiting")
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()

    scheduler.finish(waiting)
    scheduler.finish(running)

    assert scheduler.idle
    scheduler.check_integrity()
    assert scheduler.blocks.num_free == 100


def test_a_cache_for_less_than_one_request_is_refused():
    with pytest.raises(AssertionError, match="one request of max_len must fit"):
        make_scheduler(num_pages=9)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, commits, ends and aborts; the invariants hold after every step."""

    @initialize(
        pages=st.integers(10, 30),
        page_size=st.sampled_from([1, 4, 16]),
        seqs=st.integers(1, 5),
        drafts=st.integers(0, 7),
        chunk=st.integers(1, 9),
    )
    def start(self, pages: int, page_size: int, seqs: int, drafts: int, chunk: int) -> None:
        self.max_len = min(40, pages * page_size)
        self.scheduler = make_scheduler(
            pages,
            page_size=page_size,
            max_num_seqs=seqs,
            max_len=self.max_len,
            lookahead=2 * drafts + 1,
            prefill_chunk=chunk,
            prefill_budget=2 * chunk,
        )
        self.page_size, self.drafts, self.budget = page_size, drafts, 2 * chunk
        self.live: list[Request] = []
        self.order: list[Request] = []

    @rule(size=st.integers(1, 39))
    def arrive(self, size: int) -> None:
        request = make_request(min(size, self.max_len - 1), max_total=self.max_len)
        self.scheduler.add(request)
        self.live.append(request)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        before = {id(request): request.num_cached for request in self.scheduler.running}
        plan = self.scheduler.schedule()
        if not self.live:
            assert not plan.chunks
            assert not plan.decodes
            return
        assert plan.chunks or plan.decodes, "something can always go on"
        assert sum(chunk.end - chunk.start for chunk in plan.chunks) <= self.budget
        for chunk in plan.chunks:
            preempted = chunk.request in plan.preempted
            assert not preempted
            assert chunk.start == before.get(id(chunk.request), 0)
        for slot, index, page in plan.grown:
            owner = next(r for r in self.scheduler.running if r.slot == slot)
            assert owner.pages[index] == page
        for request in plan.decodes:
            reach = min(request.num_cached + 2 * self.drafts + 1, self.max_len)
            assert len(request.pages) * self.page_size >= reach
            kept = data.draw(st.integers(1, self.drafts + 1))
            kept = min(kept, request.max_total - request.num_tokens)
            commit(request, kept)
            if request.num_tokens == request.max_total or data.draw(st.integers(0, 9)) == 0:
                self.scheduler.finish(request)
                self.live.remove(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.scheduler.finish(request)
        self.live.remove(request)

    @invariant()
    def everything_has_one_owner(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            queued = [*self.scheduler.running, *self.scheduler.waiting]
            assert {id(r) for r in queued} == {id(r) for r in self.live}

    @invariant()
    def admission_keeps_the_order_of_arrival(self) -> None:
        """Running before waiting, each in order of arrival: nobody overtakes, preempted or not."""
        if hasattr(self, "scheduler"):
            queued = [*self.scheduler.running, *self.scheduler.waiting]
            assert [id(r) for r in queued] == [id(r) for r in self.live]

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for request in list(self.live):
                self.scheduler.finish(request)
            self.scheduler.check_integrity()
            assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_pages - 1


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
