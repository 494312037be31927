"""Launching decode steps and, perhaps one step later, reading what they brought.

A `Flight` is a step that the device has been told to run and whose report the host has not read. With
overlap there is at most one more: step n + 1 is launched before the report of step n is read, so the host's
own work (streaming, stopping, admitting) hides behind the device's.

    host     launch n    read n-1    launch n+1    read n    ...
    device      step n-1 |     step n          |   step n+1

What follows from reading late:
- A request's length is known only up to the run that is in flight: `Request.ahead` positions may come on top,
  and the scheduler reserves pages for them.
- A request that ended in step n also ran in step n + 1; those tokens are dropped here. Its pages are freed at
  once all the same: whatever uses them next is launched later, on the same stream.
- A preempted request keeps the tokens of the flight; only their cache is lost with its pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.engine.grammar import masks
from eyas.engine.graphs import StepGraphs, run_eagerly
from eyas.engine.postprocess import Postprocessor, attach_logprobs
from eyas.engine.request import Request
from eyas.engine.sampler import Logprobs, Needs
from eyas.engine.state import EngineState
from eyas.engine.stats import PhaseClock
from eyas.engine.step import Report, StepModels, Variant

NumDrafts = Callable[[int], int]
"""K of a step by the number of its requests."""


@dataclass(slots=True)
class Flight:
    """A launched step."""

    requests: list[Request]
    run: int
    """Tokens that each request may commit at most."""
    report: Report
    """On the host, or on its way there."""
    ready: torch.cuda.Event | None


class Launcher:
    """Runs steps for batches of requests; see the module.

    Args:
        models: target, cache, drafter.
        state: their rows.
        graphs: None to run eagerly.
        num_drafts: K by batch size.
        post: what reports are applied with.
        clock: told of phases.
    """

    def __init__(
        self,
        models: StepModels,
        state: EngineState,
        graphs: StepGraphs | None,
        *,
        num_drafts: NumDrafts,
        post: Postprocessor,
        clock: PhaseClock,
    ) -> None:
        self._models, self._state, self.graphs = models, state, graphs
        self._num_drafts, self._post, self._clock = num_drafts, post, clock
        self._host = HostBuffers()
        self._batch: tuple[int, ...] = ()
        self._slots: Tensor | None = None

    def variant(self, requests: list[Request]) -> Variant:
        """What a step for these requests must be able to do."""
        needs, num_top, known = 0, -1, 0
        for request in requests:
            needs |= request.needs
            if request.params.logprobs is not None:
                num_top = max(num_top, request.params.logprobs)
            known = max(known, request.num_cached + request.ahead)
        num_drafts = self._num_drafts(len(requests))
        return Variant(Needs(needs), min(known + num_drafts + 1, self._state.max_len), num_drafts, num_top)

    def launch(self, requests: list[Request]) -> Flight:
        """Start one speculative step for decoding requests, and the transfer of its report."""
        variant = self.variant(requests)
        batch = tuple([request.slot for request in requests])
        self._clock.start()
        bound = any(request.grammar is not None for request in requests)
        if self.graphs is not None and not bound:
            report = self.graphs.run(batch, variant, self._clock.lap)
        else:
            slots = self._slots_of(batch)
            allowed = self._allowed(requests, slots, variant) if bound else None
            report = run_eagerly(self._models, self._state, slots, variant, self._clock.lap, allowed)
        # A tree has more nodes than a run can be long.
        run = report.rows.shape[1] - 2
        for request in requests:
            request.ahead += run
        return Flight(requests, run, *self._host.fetch(report))

    def land(self, flight: Flight) -> list[Request]:
        """Wait for a step's report and apply it; returns the requests that it ended."""
        if flight.ready is not None:
            flight.ready.synchronize()
        rows = flight.report.rows.tolist()
        for request in flight.requests:
            if request.slot >= 0:
                request.ahead -= flight.run
        # Some may have ended since: in the step before, or by an abort.
        live = [i for i, request in enumerate(flight.requests) if request.finish_reason is None]
        requests = [flight.requests[i] for i in live]
        ended = self._post.apply(requests, [rows[i] for i in live])
        if flight.report.logprobs is not None:
            _attach(requests, live, flight.report.logprobs)
        return ended

    def _allowed(self, requests: list[Request], slots: Tensor, variant: Variant) -> Tensor:
        """What grammars allow; waits for the drafts."""
        state = self._state
        drafts = state.drafts[slots][:, : variant.num_drafts]
        parents = None
        if state.draft_parents is not None:
            parents = state.draft_parents[slots][:, : variant.num_drafts]
        return masks(requests, drafts, parents, state.vocab_size)

    def _slots_of(self, batch: tuple[int, ...]) -> Tensor:
        """The batch's slots on the device; the same tensor while the batch stays the same."""
        if self._slots is None or batch != self._batch:
            self._slots, self._batch = self._state.upload([batch])[0], batch
        return self._slots


def _attach(requests: list[Request], rows: list[int], logprobs: Logprobs) -> None:
    chosen, ranks, top_ids, top = (tensor.tolist() for tensor in logprobs)
    for request, row in zip(requests, rows, strict=True):
        if request.params.logprobs is not None and request.error is None:
            attach_logprobs(request, chosen[row], ranks[row], top_ids[row], top[row])


class HostBuffers:
    """Pinned memory for reports, twice: one is read while the next is on its way."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int, torch.Size], Tensor] = {}
        self._turn = 0

    def fetch(self, report: Report) -> tuple[Report, torch.cuda.Event | None]:
        """The report on the host, and the event after which it is there (None: it is there)."""
        if not report.rows.is_cuda:
            return report, None
        self._turn ^= 1
        rows = self._copy(0, report.rows)
        logprobs = report.logprobs
        if logprobs is not None:
            logprobs = Logprobs(*[self._copy(1 + place, tensor) for place, tensor in enumerate(logprobs)])
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return Report(rows, logprobs), ready

    def _copy(self, place: int, tensor: Tensor) -> Tensor:
        key = (self._turn, place, tensor.shape)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)
