"""Load on an OpenAI-compatible endpoint: vLLM, SGLang, Eyas or any other, over HTTP.

Chat completions are streamed; each event's arrival is noted. Tokens per event come from `token_ids` where
the server sends them (asked for with `return_token_ids`, which Eyas and vLLM know); otherwise the total
that `usage` reports is spread over the events by the length of their text, so speeds are exact and single
gaps are not.

Acceptance and steps come from /metrics, read before and after a cell, where the server has them under
vLLM's or Eyas's names. Nobody else should use the endpoint meanwhile.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from eyas.bench.cells import Cell
from eyas.bench.counters import Counters
from eyas.bench.datasets import Dataset
from eyas.bench.traffic import Trace, Window, poisson_starts, steady_window, summarize
from eyas.bench.workload import Prompt
from eyas.core.errors import ConfigError

OPTIONAL = ("return_token_ids", "ignore_eos", "seed")
"""Fields that not every server knows; those that it refuses are left out from then on."""


class HTTPBackend:
    """One endpoint."""

    def __init__(
        self,
        url: str,
        datasets: Sequence[Dataset],
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Take the address, with or without /v1; `model` None for the first one that the server lists."""
        self.base = url.rstrip("/").removesuffix("/v1")
        self._prompts = {dataset.name: dataset.prompts for dataset in datasets}
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model, self._timeout = model, timeout
        self._refused: set[str] = set()
        self._ready = False

    def run(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell."""
        return asyncio.run(self._run(cell))

    async def _run(self, cell: Cell) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=self.base, headers=self._headers, timeout=self._timeout, limits=limits, trust_env=False
        ) as http:
            await self._prepare(http, cell)
            before = await self._counters(http)
            streams, stop = await self._load(http, cell)
            after = await self._counters(http)
        traces = finish(streams)
        errors = [trace.error for trace in traces if trace.error is not None]
        if errors and len(errors) == len(traces):
            raise ConfigError(f"{self.base}: every request failed; the first: {errors[0]}")
        if cell.load.concurrency is None:
            window = Window(min(trace.start for trace in traces), stop, steady=False)
        else:
            window = steady_window(traces, cell.load.concurrency, stop)
        counted = after - before if after is not None and before is not None else Counters()
        result = summarize(traces, window, stop) | {"acceptance": counted.summary(), "steps": {}}
        result["token_times"] = "exact" if all(stream.counted for stream in streams) else "spread"
        return result

    async def _prepare(self, http: httpx.AsyncClient, cell: Cell) -> None:
        """Find the model's name and which fields the server takes; the first request warms it up."""
        try:
            if self._model is None:
                listed = (await http.get("/v1/models")).raise_for_status().json()
                self._model = str(listed["data"][0]["id"])
            if self._ready:
                return
            for _ in range(len(OPTIONAL) + 1):
                first = Stream(Trace(time.perf_counter()))
                await self._request(http, self._prompts[cell.dataset][0], cell, first, max_tokens=8)
                error = first.trace.error
                if error is None:
                    self._ready = True
                    return
                refused = [name for name in OPTIONAL if name not in self._refused and name in error]
                if not refused:
                    raise ConfigError(f"{self.base}: {error}")
                self._refused.update(refused)
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.base}: no OpenAI-compatible server answers there ({type(error).__name__}: {error})"
            ) from None

    async def _load(self, http: httpx.AsyncClient, cell: Cell) -> tuple[list["Stream"], float]:
        """Send the cell's requests; return their streams in the order of sending, and when it was over."""
        prompts, total = self._prompts[cell.dataset], cell.num_requests
        streams: list[Stream] = []
        begin = time.perf_counter()

        async def send(number: int, start: float) -> None:
            streams.append(Stream(Trace(start)))
            await self._request(http, prompts[number % len(prompts)], cell, streams[-1])

        async def worker(numbers: Iterator[int]) -> None:
            for number in numbers:
                await send(number, time.perf_counter())

        async def due(number: int, offset: float) -> None:
            await asyncio.sleep(max(0.0, begin + offset - time.perf_counter()))
            await send(number, begin + offset)

        if cell.load.concurrency is not None:
            supply = iter(range(total))
            tasks = [asyncio.create_task(worker(supply)) for _ in range(cell.load.concurrency)]
        else:
            assert cell.load.rate is not None, "a load has a concurrency or a rate"
            starts = poisson_starts(cell.load.rate, total, cell.settings.seed)
            tasks = [asyncio.create_task(due(i, at)) for i, at in enumerate(starts)]
        _, running = await asyncio.wait(tasks, timeout=cell.settings.limit_seconds)
        stop = time.perf_counter()
        for task in running:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return streams, stop

    async def _request(
        self,
        http: httpx.AsyncClient,
        prompt: Prompt,
        cell: Cell,
        stream: "Stream",
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Read one answer's stream; errors end up in its trace."""
        own = cell.settings
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*prompt.opening(), {"role": "user", "content": prompt.turns[0]}],
            "max_tokens": max_tokens or own.max_tokens,
            "temperature": own.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {"return_token_ids": True, "seed": own.seed}
        if own.ignore_eos:
            optional["ignore_eos"] = True
        body |= {name: value for name, value in optional.items() if name not in self._refused}
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code == 200:
                    await _read(response, stream)
                else:
                    text = (await response.aread()).decode(errors="replace")
                    stream.trace.error = f"status {response.status_code}: {text[:300]}"
        except httpx.HTTPError as error:
            stream.trace.error = f"{type(error).__name__}: {error}"
        stream.trace.end = time.perf_counter()

    async def _counters(self, http: httpx.AsyncClient) -> Counters | None:
        try:
            response = await http.get("/metrics")
        except httpx.HTTPError:
            return None
        return Counters.of_metrics(response.text) if response.status_code == 200 else None


@dataclass(slots=True)
class Stream:
    """One answer as it came."""

    trace: Trace
    events: list[tuple[float, int | None, int]] = field(default_factory=list)
    """(time, tokens if the server tells, characters) of each event."""
    num_tokens: int | None = None
    """Of the whole answer, where it ended and the server told."""

    @property
    def counted(self) -> bool:
        """Whether every event says how many tokens it holds."""
        return all(count is not None for _, count, _ in self.events)


async def _read(response: httpx.Response, stream: Stream) -> None:
    """Note the events of one stream."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        now = time.perf_counter()
        event = json.loads(data)
        if "error" in event:
            stream.trace.error = str(event["error"])[:300]
            return
        if event.get("usage"):
            stream.num_tokens = int(event["usage"]["completion_tokens"])
        for choice in event.get("choices", ()):
            text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            ids = choice.get("token_ids")
            if text or ids:
                stream.events.append((now, None if ids is None else len(ids), len(text)))


def finish(streams: Sequence[Stream]) -> list[Trace]:
    """Return the traces, with tokens in their deliveries.

    Where events do not tell, an answer's total is spread over its characters; an answer that was cut off has
    as many tokens a character as the whole ones, and one token an event if there are none.

    Example, 6 tokens in events of 1, 3 and 2 characters -> 1, 3, 2 tokens.
    """
    known = [
        (stream.num_tokens, sum(size for _, _, size in stream.events))
        for stream in streams
        if stream.num_tokens is not None
    ]
    characters = sum(size for _, size in known)
    ratio = sum(tokens for tokens, _ in known) / characters if characters else None
    for stream in streams:
        if stream.counted:
            stream.trace.deliveries = [(at, count) for at, count, _ in stream.events if count]
            continue
        size = sum(size for _, _, size in stream.events)
        total = stream.num_tokens
        if total is None:
            total = len(stream.events) if ratio is None else round(ratio * size)
        seen = given = 0
        for at, _, part in stream.events:
            seen += part
            upto = round(total * seen / max(size, 1))
            stream.trace.deliveries.append((at, upto - given))
            given = upto
    return [stream.trace for stream in streams]
