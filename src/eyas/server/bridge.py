"""Between the asyncio loop, where HTTP lives, and the thread that drives the engine.

Commands go in by a queue and are taken between two steps; pieces of output come back with
`loop.call_soon_threadsafe`, all of a step in one call. Nothing is shared but these, so no lock is held while
the engine steps, and whatever the loop decides (a client hung up) takes effect before the next step.

A step that raises ends every request that was live with an error, since nobody can say whose fault it was;
the engine goes on. If it cannot even tidy up, or fails MAX_FAILURES times without a good decode step between,
it is dead: `dead` says why, requests are refused, and `on_death` is called on the loop.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from eyas.engine.feed import GroupFeed, Piece
from eyas.engine.intake import Group
from eyas.engine.llm import EngineLoad
from eyas.engine.progress import watching_captures
from eyas.engine.results import Decode
from eyas.server.errors import ApiError
from eyas.server.methods import Methods

log = logging.getLogger("eyas.server")

MAX_FAILURES = 3

Command = Callable[[], None]


class Ticket:
    """The completions of one HTTP request on their way; lives on the loop.

    Choices are numbered through: completion i of prompt j is number j * n + i.
    """

    def __init__(self, request_id: str, method: str, groups: Sequence[Group]) -> None:
        self.request_id, self.method, self.groups = request_id, method, groups
        self.prompt_tokens = sum(len(group.prompt_ids) for group in groups)
        self.size = sum(len(group.requests) for group in groups)
        self.open = self.size
        """Completions whose last piece has not been read."""
        self.created, self.begin = time.time(), time.perf_counter()
        self.first_piece: float | None = None
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; each prompt counts once."""
        return sum(group.requests[0].stats.cached_tokens for group in self.groups)

    def deliver(self, piece: Piece) -> None:
        """Called on the loop."""
        if self.first_piece is None:
            self.first_piece = time.perf_counter()
        self._pieces.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces until every completion has had its last; ApiError if one fails."""
        while self.open:
            piece = await self._pieces.get()
            if piece.finish_reason == "error":
                raise ApiError(piece.error or "the request failed", status=500, code="generation_failed")
            if piece.finish_reason is not None:
                self.open -= 1
            yield piece


class Bridge:
    """Starts the engine's thread, hands it work, and hands its output back.

    Everything public is called on the loop.

    Args:
        methods: nobody else may use their LLMs from here on.
        max_queue: completions accepted beyond those that can run at once.
    """

    def __init__(self, methods: Methods, *, max_queue: int) -> None:
        self.methods, self.capacity = methods, methods.max_num_seqs + max_queue
        self.live: set[Ticket] = set()
        self.dead: str | None = None
        self.on_death: Callable[[], None] | None = None
        self.on_piece: Callable[[Ticket, Piece], None] | None = None
        """Told of every piece, on the loop: where metrics are counted."""
        self.loads: dict[str, EngineLoad] = self._loads()
        """Of each method, as of the last step."""
        self._sent_loads = self.loads
        self._reserved = 0
        self._owners: dict[str, tuple[Ticket, int]] = {}
        """Ticket of a live group, and the number of the group's first choice."""
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._feeds: dict[str, GroupFeed] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="eyas-engine", daemon=True)

    @property
    def num_live(self) -> int:
        """Completions accepted and not ended, those that are being prepared included."""
        return self._reserved + sum(ticket.open for ticket in self.live)

    @property
    def load(self) -> EngineLoad:
        """Of all methods together, as of the last step."""
        loads = self.loads.values()
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            pages=sum(load.pages for load in loads),
            free_pages=sum(load.free_pages for load in loads),
        )

    def start(self) -> None:
        """Start the engine's thread; its output comes to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End what still runs and wait for the thread."""
        for ticket in list(self.live):
            self.close(ticket)
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        """Hold room for `size` completions until they are submitted.

        ApiError 400 if they can never fit, 429 if they do not now, 503 if the engine is dead.
        """
        if self.dead is not None:
            raise ApiError(f"the engine has stopped: {self.dead}", status=503, code="engine_dead")
        if size > self.capacity:
            raise ApiError(f"n: {size} completions at once, and at most {self.capacity} may be", param="n")
        if self.num_live + size > self.capacity:
            raise ApiError(
                f"{self.num_live} completions run or wait, and at most {self.capacity} may: try again later",
                status=429,
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    def submit(
        self,
        groups: Sequence[Group],
        decode: Decode | None,
        *,
        method: str,
        request_id: str,
        stream: bool,
        provenance: bool = False,
    ) -> Ticket:
        """Hand groups to a method's engine; the ticket must be closed in the end, whatever happens."""
        ticket = Ticket(request_id, method, groups)
        llm = self.methods.llms[method]
        self.live.add(ticket)
        number = 0
        for group in groups:
            self._owners[group.request_id] = (ticket, number)
            number += len(group.requests)

        def begin() -> None:
            begin = llm.stats.wall_seconds
            for group in groups:
                llm.submit(group)
                clock = (lambda: llm.stats.wall_seconds - begin) if provenance else None
                self._feeds[group.request_id] = GroupFeed(group, decode, whole=not stream, clock=clock)
            self.methods.wake(method)

        self._inbox.put(begin)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Forget a ticket; what still runs of it is aborted, and its pages are free before the next step."""
        if ticket not in self.live:
            return
        self.live.remove(ticket)
        for group in ticket.groups:
            del self._owners[group.request_id]
        if not ticket.open:
            return

        def end() -> None:
            for group in ticket.groups:
                self._feeds.pop(group.request_id, None)
                self.methods.llms[ticket.method].abort(group.request_id)

        self._inbox.put(end)

    # The engine's thread.

    def _work(self) -> None:
        with watching_captures(lambda: _log_capture):
            self._steps()

    def _steps(self) -> None:
        failures, busy = 0, False
        try:
            while self._commands(wait=not busy):
                decoded = self.methods.num_decode_steps
                try:
                    busy = self.methods.step()
                except Exception as error:
                    log.exception("a step failed")
                    failures += 1
                    if failures == MAX_FAILURES:
                        raise
                    self._fail_all(f"the engine failed: {error}")
                    busy = self.methods.step()  # of nothing: if not even that works, it is over
                else:
                    if self.methods.num_decode_steps > decoded:
                        failures = 0
                self._send()
        except Exception as error:
            log.exception("the engine has stopped")
            self._feeds.clear()
            reason = f"{type(error).__name__}: {error}"
            self._tell(lambda: self._die(reason))

    def _commands(self, *, wait: bool) -> bool:
        """Carry out all commands that have come; False when told to stop."""
        while wait or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command()
            wait = False
        return True

    def _send(self) -> None:
        """Send the pieces of a step to the loop."""
        loads, before = self._loads(), self._sent_loads
        self._sent_loads = loads
        batch: list[tuple[str, Piece]] = []
        for request_id in list(self._feeds):
            feed = self._feeds[request_id]
            batch += [(request_id, piece) for piece in feed.take()]
            if feed.group.finished:
                del self._feeds[request_id]
        if batch or loads != before:  # do not wake the loop for nothing
            self._tell(lambda: self._deliver(batch, loads))

    def _loads(self) -> dict[str, EngineLoad]:
        return {name: llm.load() for name, llm in self.methods.llms.items()}

    def _fail_all(self, message: str) -> None:
        batch = []
        for request_id in self._feeds:
            for llm in self.methods.llms.values():
                llm.abort(request_id)
            batch.append((request_id, _failure(0, message)))
        self._feeds.clear()
        self._tell(lambda: self._deliver(batch, None))

    def _tell(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function)

    # Back on the loop.

    def _deliver(self, batch: list[tuple[str, Piece]], loads: dict[str, EngineLoad] | None) -> None:
        if loads is not None:
            self.loads = loads
        for request_id, piece in batch:
            if request_id not in self._owners:
                continue  # closed meanwhile
            ticket, number = self._owners[request_id]
            ticket.deliver(replace(piece, index=number + piece.index) if number else piece)
            if self.on_piece is not None:
                self.on_piece(ticket, piece)

    def _die(self, reason: str) -> None:
        self.dead = reason
        for ticket in self.live:
            ticket.deliver(_failure(0, f"the engine has stopped: {reason}"))
        if self.on_death is not None:
            self.on_death()


def _failure(index: int, message: str) -> Piece:
    return Piece(index, "", [], [], None, finish_reason="error", error=message)


def _log_capture(seconds: float) -> None:
    """Requests waited: that is worth a warning."""
    log.warning(
        "capturing a CUDA graph at its first use took %.1f s (--warm-graphs: before serving)", seconds
    )
