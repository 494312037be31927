"""Who runs in the next step; integers and deques only, no tensors.

Rules
- First come, first served. A request is admitted when a state row is free and pages for its known tokens
  and one whole step are; it keeps them until it ends or is preempted.
- Every decoding request owns pages for `lookahead` positions past its length before a step starts:
  K + 1 verified rows, then K rows that a drafter may write behind them. Positions at or past `max_len`
  have no page.
- With a step in flight (engine/flight) a request may be `ahead` of what is known of it: its pages reach
  so much further.
- When pages run out, the newest running request is preempted: its pages are freed and it goes back to the
  front of the queue. The oldest request can always go on, because one request of max_len fits.
- With prefix caching, pages that are full and whose tokens are known are told to the block manager, and a
  newcomer shares those that hold its own beginning instead of computing them. What it shares it never
  writes to.
- A step prefills at most `prefill_budget` tokens, `prefill_chunk` a request, so that decoding requests are
  never held up for longer. All tokens but the last are prefilled; a request whose prefill ends in this
  step decodes in this step.

Example, page_size 4, K = 3 (lookahead 7), prompt of 6 tokens: prefill positions 0..4; the first step
verifies positions 5..8 and drafts up to 11, so it is admitted with 12 / 4 = 3 pages.
"""

from collections import deque
from dataclasses import dataclass, field

from eyas.engine.block_manager import BlockManager
from eyas.engine.prefix import extend_keys
from eyas.engine.request import Request

TOP_UP = 64
"""Tokens whose pages all requests get at once when one comes to a new page and pages are plenty."""


@dataclass(slots=True)
class Chunk:
    """Prefill tokens [start, end) of a request."""

    request: Request
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """One step. `grown` lists pages newly owned: (slot, index in the page table, page)."""

    admitted: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_known: int = 0
    """Tokens of the admitted that K and V are needed of."""
    num_shared: int = 0
    """How many of those were found in the prefix cache."""


class Scheduler:
    """Queues, state rows and pages."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        page_size: int,
        max_num_seqs: int,
        max_len: int,
        lookahead: int,
        prefill_chunk: int,
        prefill_budget: int,
        admit_together: int = 1,
        prefix_salt: bytes | None = None,
    ) -> None:
        assert (blocks.num_pages - 1) * page_size >= max_len, "one request of max_len must fit"
        assert 0 < prefill_chunk <= prefill_budget
        self.blocks, self.page_size, self.max_len, self.lookahead = blocks, page_size, max_len, lookahead
        self.prefill_chunk, self.prefill_budget = prefill_chunk, prefill_budget
        self.admit_together = admit_together
        self.prefix_salt = prefix_salt
        """Names target and drafter in the keys of pages; None for no prefix caching."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In the order of admission, oldest first."""
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Free all that a request holds, wherever it is (end or abort)."""
        if request.slot >= 0:
            self.running.remove(request)
            if request.error is not None:
                self.blocks.drop(request.pages)  # whatever went wrong is not to be shared
            else:
                self._keep(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> Plan:
        """Plan the next step: grow, prefill, admit. Empty decodes and chunks mean nothing to do."""
        plan = Plan()
        budget = self.prefill_budget
        if self.prefix_salt is not None:
            for request in self.running:
                if request.num_cached >= (request.num_kept + 1) * self.page_size:
                    self._keep(request)
        self._grow(plan)
        for request in self.running:
            if not request.decoding:
                budget -= self._chunk(request, budget, plan)
        if not plan.preempted:
            self._admit(budget, plan)
        plan.decodes = [r for r in self.running if r.decoding and not r.surely_ends]
        return plan

    def distrust(self) -> None:
        """A step has failed, and who knows what it wrote: share nothing that running requests own."""
        for request in self.running:
            self.blocks.drop(request.pages)
            request.num_kept = len(request.pages)

    def check_integrity(self) -> None:
        """Assert that every state row has exactly one owner, and every page those that it is counted for."""
        self.blocks.check_integrity(request.pages for request in self.running)
        slots = [request.slot for request in self.running]
        total = len(self.free_slots) + len(slots)
        assert sorted([*slots, *self.free_slots]) == list(range(total)), "a state row got lost"
        assert all(request.slot < 0 and not request.pages for request in self.waiting)

    def _pages_for(self, num_cached: int) -> int:
        """Pages that a step from this length may touch."""
        return -(-min(num_cached + self.lookahead, self.max_len) // self.page_size)

    def _grow(self, plan: Plan) -> None:
        """Give every decoding request the pages of its next step, preempting the newest if need be.

        Where pages are plenty, all requests get those of the next TOP_UP tokens in the same upload: between
        two steps the device should find as little as possible to do.

        Oldest first: a request that has grown in this step is older than any that is preempted after it, so
        `grown` never names a row that was given up.
        """
        for request in list(self.running):
            if request.slot < 0:
                continue  # preempted for the sake of an older one
            missing = self._pages_for(request.num_cached + request.ahead) - len(request.pages)
            if missing <= 0:
                continue
            while self.blocks.num_free < missing and request.slot >= 0:
                self._preempt(self.running[-1], plan)
            if request.slot >= 0:
                self._append(request, missing, plan)
        if plan.grown and not plan.preempted:
            self._top_up(plan)

    def _top_up(self, plan: Plan) -> None:
        """Give decoding requests the pages of the next TOP_UP tokens, if a quarter of the free is enough."""
        missing = [
            (one, self._pages_for(min(one.num_cached + one.ahead + TOP_UP, one.max_total)) - len(one.pages))
            for one in self.running
            if one.decoding
        ]
        if 4 * sum(max(count, 0) for _, count in missing) <= self.blocks.num_free:
            for request, count in missing:
                if count > 0:
                    self._append(request, count, plan)

    def _append(self, request: Request, count: int, plan: Plan) -> None:
        first = len(request.pages)
        request.pages += self.blocks.allocate(count)
        plan.grown += [(request.slot, i, request.pages[i]) for i in range(first, first + count)]

    def _chunk(self, request: Request, budget: int, plan: Plan) -> int:
        """Plan a prefill chunk within the budget and count it as cached; returns its length."""
        start = request.num_cached
        end = min(request.num_tokens - 1, start + self.prefill_chunk, start + budget)
        if end > start:
            plan.chunks.append(Chunk(request, start, end))
            request.num_cached = end
        return end - start

    def _admit(self, budget: int, plan: Plan) -> None:
        """Take requests from the front of the queue while rows, pages and budget last."""
        if self.running and len(self.free_slots) < min(self.admit_together, len(self.waiting)):
            return
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            known = request.num_tokens - 1
            if known > 0 and budget <= 0:
                break
            shared = self._find(request)
            need = self._pages_for(known) - len(shared)
            free = self.blocks.num_free - self.blocks.num_unowned(shared)
            # Leave a page for each running request that may still grow, else the newcomer is preempted soon.
            most = self._pages_for(self.max_len)
            spare = sum(len(one.pages) < most for one in self.running)
            if need + spare > free and (self.running or need > free):
                break
            self.waiting.popleft()
            request.slot = self.free_slots.pop()
            self.blocks.share(shared)
            request.pages = shared + self.blocks.allocate(need)
            request.num_cached = len(shared) * self.page_size
            request.num_kept = len(shared)
            if request.stats.preemptions == 0:
                request.stats.cached_tokens = request.num_cached
                plan.num_known += known
                plan.num_shared += request.num_cached
            self.running.append(request)
            plan.admitted.append(request)
            budget -= self._chunk(request, budget, plan)

    def _find(self, request: Request) -> list[int]:
        """Pages that hold the beginning of a request's tokens."""
        if self.prefix_salt is None:
            return []
        return self.blocks.find(self._keys(request, (request.num_tokens - 1) // self.page_size))

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Keys of a request's first pages, `count` at least."""
        if len(request.keys) < count:
            assert self.prefix_salt is not None
            extend_keys(request.keys, request.token_ids, self.page_size, self.prefix_salt)
        return request.keys

    def _keep(self, request: Request) -> None:
        """Tell the block manager of pages that have become full since the last time.

        The newest token is known, so of each full page the token behind it is too. A chunk planned in this
        step is not counted as cached before the next, when it has been computed.
        """
        num_full = min(request.num_cached, request.num_tokens - 1) // self.page_size
        if self.prefix_salt is None or num_full <= request.num_kept:
            return
        keys = self._keys(request, num_full)
        for index in range(request.num_kept, num_full):
            self.blocks.keep(request.pages[index], keys[index])
        request.num_kept = num_full

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Send the newest running request back to the front of the queue."""
        assert self.running[-1] is request
        self.running.pop()
        self._keep(request)
        self._release(request)
        request.stats.preemptions += 1
        self.waiting.appendleft(request)
        plan.preempted.append(request)

    def _release(self, request: Request) -> None:
        """Give pages and state row back."""
        self.blocks.free(request.pages)
        self.free_slots.append(request.slot)
        request.pages, request.slot, request.num_cached, request.ahead = [], -1, 0, 0
        request.num_kept = 0
