"""The host's loop: schedule, prefill, launch a decode step, read a report (with overlap the last step's).

What the host does for a decode step of B requests when nobody joins or leaves, in this order:

    schedule    passes over B: pages for the step after the one in flight, who decodes
    pages       only where a request has come to a new page: one pinned upload for all of them, those of the
                next 64 tokens with it where pages are plenty, and one write
    variant     a pass over B: needs, log-probabilities, longest context; K by batch size
    launch      a look-up by (bucket, variant), the slots if the batch changed, one graph launch
    report      a copy to pinned memory and an event; two more events for the clock
    land        wait for the event of the step before; its report as a list; a pass over B (postprocess)

With overlap all but the launch runs while the device works. An admission adds one pinned upload, some seven
small launches and a prefill (a copy and a graph launch for up to 4,096 tokens, engine/prefill_graphs), on the
same stream; none of them waits for the device.
"""

import time
from collections.abc import Callable, Sequence

import torch

from eyas.core.errors import ConfigError
from eyas.core.model_config import TargetConfig
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.engine.block_manager import BlockManager
from eyas.engine.calibrated import Schedule
from eyas.engine.flight import Flight, Launcher, NumDrafts
from eyas.engine.graphs import StepGraphs, bucket_of, visible_bound
from eyas.engine.kv_cache import allocate, cache_sizes
from eyas.engine.postprocess import Postprocessor
from eyas.engine.prefill import prefill
from eyas.engine.prefill_graphs import BLOCK_ROWS, PrefillGraphs
from eyas.engine.recorder import Recorder
from eyas.engine.request import Request
from eyas.engine.sampler import Needs
from eyas.engine.scheduler import Plan, Scheduler
from eyas.engine.state import EngineState
from eyas.engine.stats import EngineStats, PhaseClock
from eyas.engine.step import StepModels, Variant
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
        overlap: bool,
        prefix_caching: bool,
        time_phases: bool,
        schedule: Schedule | None = None,
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
            prefix_salt=_salt(target, drafter) if prefix_caching else None,
        )
        self.stats = EngineStats()
        self._clock = PhaseClock(self.stats, device)
        self._graphs: StepGraphs | None = None
        self._prefills: PrefillGraphs | None = None
        if device.type == "cuda" and not enforce_eager:
            recorder = Recorder()
            self._graphs = StepGraphs(self.models, self.state, recorder, by_phase=time_phases)
            most_blocks = -(-prefill_budget // BLOCK_ROWS)
            self._prefills = PrefillGraphs(self.models, self.state, recorder, most_blocks=most_blocks)
        self._num_drafts: NumDrafts = schedule.num_drafts if schedule is not None else lambda _: num_drafts
        self._launcher = Launcher(
            self.models,
            self.state,
            self._graphs,
            num_drafts=self._num_drafts,
            post=Postprocessor(depth, self.stats),
            clock=self._clock,
        )
        self._overlap = overlap
        self._flight: Flight | None = None

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Launch one step; returns the requests that ended (with overlap in the step before it)."""
        try:
            return self._step()
        except BaseException:
            self.scheduler.distrust()
            raise

    def _step(self) -> list[Request]:
        begin = time.perf_counter()
        # A grammar must know all tokens so far before the next step is launched.
        overlap = self._overlap and all(one.grammar is None for one in self.scheduler.running)
        early = [] if overlap else self._land()
        plan = self.scheduler.schedule()
        self.stats.preemptions += len(plan.preempted)
        self.stats.prefix_tokens += plan.num_known
        self.stats.prefix_hits += plan.num_shared
        self._update_rows(plan)
        if plan.chunks:
            self._clock.start()
            if self._prefills is not None:
                self._prefills.run(plan.chunks)
            else:
                prefill(self.models, self.state, plan.chunks)
            self._clock.lap("prefill_seconds")
            self.stats.prefill_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
        launched = self._launcher.launch(plan.decodes) if plan.decodes else None
        self.stats.steps += launched is not None
        ended = early + (self._land() if overlap else [])
        self._flight = launched
        if not self._overlap:
            ended += self._land()
        if self.scheduler.idle:
            self._flight = None  # of requests that have all ended
        self._clock.collect()
        self.stats.wall_seconds += time.perf_counter() - begin
        return ended

    def _land(self) -> list[Request]:
        """Read the report of the step in flight, if there is one, and release the requests that it ended."""
        flight, self._flight = self._flight, None
        ended = [] if flight is None else self._launcher.land(flight)
        for request in ended:
            self.release(request)
        return ended

    def release(self, request: Request) -> None:
        """Free everything that a request holds: it ended or was aborted."""
        self.scheduler.finish(request)
        own = request.stats
        own.accepted_by_depth = [sum(request.runs[depth + 1 :]) for depth in range(1, len(request.runs) - 1)]
        if self.scheduler.idle:
            self.scheduler.check_integrity()

    @torch.no_grad()
    def warm(self, progress: Callable[[int, int], None]) -> None:
        """Capture the graphs of prefill and of greedy and sampled steps, for every size and context length.

        `progress` is told of (graphs done, graphs in all).
        """
        if self._graphs is None or self._prefills is None:
            return
        sizes = [1 << power for power in range(bucket_of(self.state.num_slots).bit_length())]
        bounds = {visible_bound(min(1 << power, self.state.max_len)) for power in range(32)}
        wanted = [
            (size, Variant(needs, bound, self._num_drafts(size)))
            for size in sizes
            for bound in bounds
            for needs in (Needs.GREEDY, Needs.SAMPLE)
        ]
        captures = self._prefills.to_warm() + self._graphs.to_warm(wanted)
        for done, capture in enumerate(captures):
            progress(done, len(captures))
            capture()
        progress(len(captures), len(captures))

    @torch.no_grad()
    def warm_prefill(self, context: int) -> None:
        """Capture the graphs of prefill alone, for prompts of up to so many tokens."""
        for capture in [] if self._prefills is None else self._prefills.to_warm(context):
            capture()

    def _update_rows(self, plan: Plan) -> None:
        """Bring the state tensors up to the plan."""
        self.state.set_pages(plan.grown)
        if plan.admitted:
            self.state.admit(plan.admitted)


def _salt(target: Target, drafter: Drafter | None) -> bytes:
    """Whose K and V the pages hold."""
    return f"{target.identity.fingerprint} {None if drafter is None else drafter.name}".encode()


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
