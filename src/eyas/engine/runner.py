"""The host's loop: schedule, prefill, decode, postprocess. One report is read back a step."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core.errors import ConfigError
from eyas.core.model_config import TargetConfig
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.engine.block_manager import BlockManager
from eyas.engine.graphs import FirstHalf, StepGraphs, first_half, second_half
from eyas.engine.kv_cache import allocate, cache_sizes
from eyas.engine.postprocess import Postprocessor, attach_logprobs
from eyas.engine.prefill import prefill
from eyas.engine.request import Request
from eyas.engine.sampler import Needs, raw_logprobs
from eyas.engine.scheduler import Plan, Scheduler
from eyas.engine.state import EngineState
from eyas.engine.stats import EngineStats, PhaseClock
from eyas.engine.step import StepModels, committed_logits
from eyas.targets.base import Target


class Runner:
    """Owns the models, their caches, the state tensors and the scheduler."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        max_len: int,
        max_num_seqs: int,
        page_size: int | None,
        num_pages: int | None,
        gpu_memory_fraction: float,
        prefill_chunk: int,
        prefill_budget: int,
        admit_together: int,
        eos_token_ids: Sequence[int],
        enforce_eager: bool,
    ) -> None:
        device = target.device
        num_drafts = 0 if drafter is None else drafter.num_draft_tokens
        depth = 0 if drafter is None else drafter.tree.depth
        scratch_rows = 0 if drafter is None else drafter.tree.num_scratch_rows
        lookahead = max(num_drafts + 1, depth + 1 + scratch_rows)
        draft_layout = None if drafter is None else drafter.kv_layout
        layouts = [target.decoder.kv_layout, *([draft_layout] if draft_layout is not None else [])]
        rows = max(max_num_seqs * (num_drafts + 1), prefill_budget)
        config = target.config
        # Logits in the model's type, once more in float32 while they are processed, and activations.
        row_bytes = 8 * config.vocab_size + 16 * (config.hidden_size + config.intermediate_size)
        sizes = cache_sizes(
            layouts,
            dtype=target.dtype,
            device=device,
            max_len=max_len,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            num_pages=num_pages,
            gpu_memory_fraction=gpu_memory_fraction,
            workspace_bytes=rows * row_bytes,
        )
        cache = allocate(layouts[0], sizes, dtype=target.dtype, device=device)
        if drafter is not None:
            draft_cache = None
            if draft_layout is not None:
                draft_cache = allocate(draft_layout, sizes, dtype=target.dtype, device=device)
            drafter.bind(draft_cache, max_len)
        self.target = target
        self.models = StepModels(target.decoder, cache, drafter)
        self.state = EngineState(
            max_num_seqs,
            num_draft_tokens=num_drafts,
            tree=_tree_of(drafter, config),
            max_len=max_len,
            page_size=sizes.page_size,
            vocab_size=config.vocab_size,
            eos_token_ids=eos_token_ids,
            device=device,
        )
        self.scheduler = Scheduler(
            BlockManager(sizes.num_pages),
            page_size=sizes.page_size,
            max_num_seqs=max_num_seqs,
            max_len=max_len,
            lookahead=lookahead,
            prefill_chunk=prefill_chunk,
            prefill_budget=prefill_budget,
            admit_together=admit_together,
        )
        self.stats = EngineStats()
        self._post = Postprocessor(depth, self.stats)
        self._clock = PhaseClock(self.stats, device)
        graphs = device.type == "cuda" and not enforce_eager
        self._graphs = StepGraphs(self.models, self.state) if graphs else None
        self._batch: tuple[int, ...] = ()
        self._slots: Tensor | None = None
        self._pinned: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one step; returns the requests that ended. Does nothing when idle."""
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        self.stats.preemptions += len(plan.preempted)
        self._update_rows(plan)
        if plan.chunks:
            self._clock.start()
            prefill(self.models, self.state, plan.chunks)
            self._clock.lap("prefill_seconds")
            self.stats.prefill_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        ended = self._decode(plan.decodes) if plan.decodes else []
        for request in ended:
            self.release(request)
        self._clock.collect()
        self.stats.wall_seconds += time.perf_counter() - begin
        return ended

    def release(self, request: Request) -> None:
        """Free everything that a request holds: it ended or was aborted."""
        self.scheduler.finish(request)
        own = request.stats
        own.accepted_by_depth = [sum(request.runs[depth + 1 :]) for depth in range(1, len(request.runs) - 1)]
        if self.scheduler.idle:
            self.scheduler.check_integrity()

    def _update_rows(self, plan: Plan) -> None:
        """Bring the state tensors up to the plan."""
        self.state.set_pages(plan.grown)
        if plan.admitted:
            self.state.admit(plan.admitted)

    def _decode(self, requests: list[Request]) -> list[Request]:
        """One speculative step for all decoding requests."""
        needs, num_top = 0, -1
        for request in requests:
            needs |= request.needs
            if request.params.logprobs is not None:
                num_top = max(num_top, request.params.logprobs)
        batch = tuple([request.slot for request in requests])
        reach = max([request.num_cached for request in requests]) + self.state.num_draft_tokens + 1
        max_visible = min(reach, self.state.max_len)
        self.stats.steps += 1
        self._clock.start()
        if self._graphs is not None and num_top < 0 and self._graphs.can_run(Needs(needs)):
            captured = self._graphs.prepare(batch, Needs(needs), max_visible)
            captured.verify_graph.replay()
            self._clock.lap("verify_seconds")
            report, ready = self._send(captured.first.report)
            captured.draft_graph.replay()
            self._clock.lap("draft_seconds")
        else:
            first = first_half(self.models, self.state, self._slots_of(batch), Needs(needs), max_visible)
            self._clock.lap("verify_seconds")
            report, ready = self._send(first.report)
            second_half(self.models, self.state, first)
            self._clock.lap("draft_seconds")
        if ready is not None:
            ready.synchronize()
        ended = self._post.apply(requests, report[: len(requests)].tolist())
        if num_top >= 0:
            self._attach_logprobs(requests, first, num_top)
        return ended

    def _slots_of(self, batch: tuple[int, ...]) -> Tensor:
        """The batch's slots on the device; the same tensor while the batch stays the same."""
        if self._slots is None or batch != self._batch:
            self._slots = torch.tensor(batch, dtype=torch.int64).to(self.state.device)
            self._batch = batch
        return self._slots

    def _send(self, report: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the one transfer of a step; on CUDA the device goes on drafting meanwhile."""
        if not report.is_cuda:
            return report, None
        host = self._pinned.get(report.shape[0])
        if host is None:
            host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            self._pinned[report.shape[0]] = host
        host.copy_(report, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return host, ready

    @staticmethod
    def _attach_logprobs(requests: list[Request], first: FirstHalf, num_top: int) -> None:
        """Read log-probabilities back for the requests that asked for them (a second transfer)."""
        logits = committed_logits(first.verified, first.accepted)
        logprobs = raw_logprobs(logits, first.accepted.tokens, num_top)
        chosen, ranks, top_ids, top = (tensor.tolist() for tensor in logprobs)
        for row, request in enumerate(requests):
            if request.params.logprobs is not None and request.error is None:
                attach_logprobs(request, chosen[row], ranks[row], top_ids[row], top[row])


def _tree_of(drafter: Drafter | None, config: TargetConfig) -> TreeBudget | None:
    """The bounds of a drafter's trees, None for chains.

    ConfigError where the target's window cannot hold a path.
    """
    if drafter is None or not isinstance(drafter.tree, TreeBudget):
        return None
    narrowest = min((window for window in config.windows or () if window is not None), default=None)
    if narrowest is not None and narrowest <= drafter.tree.depth:
        raise ConfigError(
            f"tree {drafter.tree}: its depth must be below the target's sliding window of {narrowest} tokens"
        )
    return drafter.tree
