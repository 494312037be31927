"""Prometheus metrics. Speculation is counted under vLLM's names too, for tools that know those."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eyas.engine.feed import Piece
from eyas.server.bridge import Bridge, Ticket

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """What one server counted."""

    def __init__(self, bridge: Bridge, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(bridge, model_name))

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=SECONDS, registry=self._registry)

        self.requests = counter("eyas_http_requests", "HTTP requests to the API.", ("path", "status"))
        self._finished = counter("eyas_completions_finished", "Completions that ended.", ("reason",))
        self._prompt_tokens = counter("eyas_prompt_tokens", "Prompt tokens accepted.")
        self._first = histogram("eyas_time_to_first_token_seconds", "Until a stream's first piece.")
        self._whole = histogram("eyas_request_seconds", "From acceptance to the end, or to the hang-up.")
        bridge.on_piece = self._piece

    def began(self, ticket: Ticket) -> None:
        """A request was accepted."""
        self._prompt_tokens.inc(ticket.prompt_tokens)

    def ended(self, ticket: Ticket, *, stream: bool) -> None:
        """A request was closed; completions that had not ended were cut off."""
        self._whole.observe(time.perf_counter() - ticket.begin)
        if stream and ticket.first_piece is not None:
            self._first.observe(ticket.first_piece - ticket.begin)
        if ticket.open:
            self._finished.labels("abort").inc(ticket.open)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def _piece(self, ticket: Ticket, piece: Piece) -> None:  # noqa: ARG002 - the bridge's signature
        if piece.finish_reason is not None:
            self._finished.labels(piece.finish_reason).inc()


class _EngineCollector(Collector):
    """Reads each engine's own counters when asked; the label says whose they are."""

    def __init__(self, bridge: Bridge, model_name: str) -> None:
        self._bridge, self._model_name = bridge, model_name

    def collect(self) -> Iterator[Metric]:
        """One sample of each for every method."""
        up = int(self._bridge.dead is None)
        yield GaugeMetricFamily("eyas_engine_up", "1 while the engine's thread is well.", value=up)
        llms = self._bridge.methods.llms
        whose = [[self._model_name if len(llms) == 1 else f"{self._model_name}:{name}"] for name in llms]
        stats = [llm.stats for llm in llms.values()]
        for kind, table, sources in (
            (GaugeMetricFamily, _LOAD_GAUGES, [self._bridge.loads[name] for name in llms]),
            (GaugeMetricFamily, _GAUGES, stats),
            (CounterMetricFamily, _COUNTERS, stats),
        ):
            for name, (text, field) in table.items():
                family = kind(name, text, labels=["model_name"])
                for label, source in zip(whose, sources, strict=True):
                    family.add_metric(label, getattr(source, field))
                yield family
        by_depth = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted by position.",
            labels=["model_name", "position"],
        )
        for label, own in zip(whose, stats, strict=True):
            for position, count in enumerate(own.accepted_by_depth):
                by_depth.add_metric([*label, str(position)], count)
        yield by_depth


_LOAD_GAUGES = {
    "eyas_requests_running": ("Completions that the engine runs.", "running"),
    "eyas_requests_waiting": ("Completions that wait for a place.", "waiting"),
    "eyas_kv_pages": ("KV pages.", "pages"),
    "eyas_kv_pages_free": (
        "KV pages that nobody owns, those kept for their contents included.",
        "free_pages",
    ),
}
"""Name -> (what it is, field of EngineLoad)."""
_GAUGES = {
    "eyas_prefix_cache_hit_rate": ("Share of prompt tokens found in the prefix cache.", "prefix_hit_rate"),
    "eyas_acceptance_length": ("1 + accepted / runs of drafts, since the start.", "acceptance_length"),
    "eyas_tokens_per_forward": ("Tokens kept a target forward and request.", "tokens_per_forward"),
}
"""Name -> (what it is, field of EngineStats)."""
_COUNTERS = {
    "eyas_generation_tokens": ("Output tokens kept.", "committed"),
    "eyas_prefill_tokens": ("Prompt tokens computed, those of preempted requests again.", "prefill_tokens"),
    "eyas_prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_tokens"),
    "eyas_prefix_cache_hits": ("Prompt tokens found there.", "prefix_hits"),
    "vllm:prefix_cache_queries": ("As eyas_prefix_cache_queries.", "prefix_tokens"),
    "vllm:prefix_cache_hits": ("As eyas_prefix_cache_hits.", "prefix_hits"),
    "eyas_preemptions": ("Requests sent back to the queue for want of pages.", "preemptions"),
    "eyas_engine_steps": ("Target forwards.", "steps"),
    "eyas_engine_prefill_seconds": ("Time in prefill.", "prefill_seconds"),
    "eyas_engine_step_seconds": ("Time in decode steps timed as a whole (CUDA graphs).", "step_seconds"),
    "eyas_engine_verify_seconds": ("Time in target forwards and acceptance.", "verify_seconds"),
    "eyas_engine_draft_seconds": ("Time in drafting.", "draft_seconds"),
    "vllm:spec_decode_num_drafts": ("Runs of drafts verified.", "drafted_row_steps"),
    "vllm:spec_decode_num_draft_tokens": ("Drafts verified.", "drafted"),
    "vllm:spec_decode_num_accepted_tokens": ("Drafts accepted.", "accepted"),
}
"""Name -> (what it is, field of EngineStats)."""
