"""Measure the cells of a sweep that a record does not hold yet, and add them to it.

A `Backend` runs one cell; there are two: engines in this process (`LocalBackend`, engines built by a callable
that is handed in) and OpenAI-compatible endpoints (`client.HTTPBackend`). A record is JSONL: a line of
type "run" for each invocation, with its provenance, and one of type "cell" for each cell. What the fields
mean is in docs/benchmarks/sweep-jsonl.md.
"""

import gzip
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from eyas.bench.cells import Cell, Method
from eyas.bench.inprocess import Engine, Run, run_closed, run_open, warm_up
from eyas.bench.intervals import bootstrap_interval
from eyas.bench.records import append_record
from eyas.bench.traffic import poisson_starts, summarize
from eyas.core.errors import ConfigError, DataError
from eyas.core.sampling import SamplingParams

SCHEMA = "eyas.sweep/1"


class Backend(Protocol):
    """Runs one cell and returns its result as plain JSON values."""

    def run(self, cell: Cell) -> dict[str, Any]:
        """Measure."""
        ...


def sweep(
    cells: Sequence[Cell],
    record: Path,
    backend_of: Callable[[Method], Backend],
    provenance: dict[str, Any],
    *,
    advance: Callable[[Cell, dict[str, Any] | None], None] = lambda _cell, _result: None,
    until: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Measure what `record` lacks; returns how many cells were measured.

    `advance` is called for every cell, with None for a result where it was there already. No cell is begun
    when the clock is at `until` or later.
    """
    done = (
        {line["id"] for line in read_records([record]) if line["type"] == "cell"}
        if record.exists()
        else set()
    )
    run_id = ""
    measured = 0
    for cell in cells:
        if cell.id in done:
            advance(cell, None)
            continue
        if until is not None and clock() >= until:
            break
        result = backend_of(cell.method).run(cell)
        if not run_id:
            run_id = f"{provenance['time']}-{cell.id[:6]}"
            append_record(record, {"schema": SCHEMA, "type": "run", "run": run_id, "provenance": provenance})
        line = {"schema": SCHEMA, "type": "cell", "id": cell.id, "run": run_id}
        append_record(record, line | {"cell": cell.describe(), "result": rounded(result)})
        measured += 1
        advance(cell, result)
    return measured


def read_records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return all lines of records, .jsonl or .jsonl.gz; DataError names the file and line that is not one.

    A last line without its end, left by a machine that went down, is passed over.
    """
    found = []
    for path in paths:
        try:
            raw = path.read_bytes()
            lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8").split("\n")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: the record cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                if number == len(lines):
                    continue
                raise DataError(f"{path}, line {number}: not JSON") from None
            if not isinstance(value, dict) or value.get("schema") != SCHEMA:
                raise DataError(f"{path}, line {number}: not a record of `eyas bench sweep` ({SCHEMA})")
            found.append(value)
    return found


class LocalBackend:
    """Engines in this process, one per method, kept for all cells (or one at a time)."""

    def __init__(
        self,
        build: Callable[[Method, bool], Engine],
        prompts: Mapping[str, Sequence[list[int]]],
        *,
        warm_up_concurrency: int,
        keep: bool = True,
        graphs: bool = True,
    ) -> None:
        """Take what builds an engine (method, phases timed or not), prompts by data set, largest batch.

        `graphs` says whether engines have something to capture before cells are timed.
        """
        self._build, self._prompts, self._keep = build, prompts, keep
        self._warm_up_concurrency = warm_up_concurrency
        self._graphs = graphs
        self._engines: dict[tuple[Method, bool], Engine] = {}
        self.num_prepared, self.prepare_seconds = 0, 0.0
        """Engines that were built and warmed up, and the time that took."""

    def run(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell."""
        engine, prompts = self._engine(cell), self._prompts[cell.dataset]
        params, limit = _params(cell), cell.settings.limit_seconds
        if cell.load.concurrency is not None:
            run = run_closed(
                engine,
                prompts,
                params,
                concurrency=cell.load.concurrency,
                num_requests=cell.num_requests,
                limit_seconds=limit,
            )
        else:
            assert cell.load.rate is not None, "a load has a concurrency or a rate"
            starts = poisson_starts(cell.load.rate, cell.num_requests, cell.settings.seed)
            run = run_open(engine, prompts, params, starts=starts, limit_seconds=limit)
        return result_of(run)

    def _engine(self, cell: Cell) -> Engine:
        key = (cell.method, cell.phases)
        engine = self._engines.get(key)
        if engine is None:
            # Phases come after everything else: engines of both ways need not fit together.
            if not self._keep or any(phases != cell.phases for _, phases in self._engines):
                self._engines.clear()
            begin = time.perf_counter()
            engine = self._engines[key] = self._build(cell.method, cell.phases)
            every = [ids for part in self._prompts.values() for ids in part]
            warm_up(engine, every, _params(cell), self._warm_up_concurrency, graphs=self._graphs)
            self.num_prepared += 1
            self.prepare_seconds += time.perf_counter() - begin
        return engine


def result_of(run: Run) -> dict[str, Any]:
    """Return what a run in this process says: speeds, latencies, acceptance, the time of a step by phase."""
    errors = [trace.error for trace in run.traces if trace.error is not None]
    if errors and len(errors) == len(run.traces):
        raise ConfigError(f"every request failed; the first: {errors[0]}")
    pairs = [(t.num_tokens, t.num_steps) for t in run.traces if t.completed and t.num_steps]
    result = summarize(run.traces, run.window, run.stop)
    result["acceptance"] = run.counters.summary()
    result["steps"] = run.counters.step_summary(run.window.seconds)
    if pairs:
        estimate = bootstrap_interval(pairs, lambda rows: sum(n for n, _ in rows) / sum(s for _, s in rows))
        result["tokens_per_forward_interval"] = [estimate.low, estimate.high]
    return result


def rounded(value: Any) -> Any:
    """Return JSON values with floats of six significant digits: enough, and lines stay short."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def _params(cell: Cell) -> SamplingParams:
    own = cell.settings
    return SamplingParams(
        temperature=own.temperature, max_tokens=own.max_tokens, ignore_eos=own.ignore_eos, seed=own.seed
    )
