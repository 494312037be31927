"""From the cells of a sweep to its tables; pure functions.

A *row* is what all repeats of (method, K, engine, data set, load) say together. For each place (data set,
load) a method stands at its best K, the one of highest throughput there.

Why one method leads another. Over a window of steady load,

    tokens a second = rows a step * tokens a forward / seconds a step

exactly, so the ratio of two methods is the product of three factors: acceptance (tokens a forward), step
time and how full the batch was. Each is reported; the reason names the greatest, and the phase of the step
in which the times differ most. Endpoints that do not count steps give acceptance, and step time as what
remains.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from eyas.bench.cells import PLAIN, label_of
from eyas.bench.intervals import (
    Estimate,
    Spread,
    geometric_interval,
    paired_spread,
    pooled_spread,
    ratio_interval,
)
from eyas.bench.sources import published_ratio
from eyas.bench.sweep import read_records
from eyas.core.errors import DataError

PHASES = ("verify_ms", "draft_ms", "prefill_ms", "other_ms")
SAME_EVERYWHERE = ("max_tokens", "temperature", "ignore_eos")
SAME_IN_A_ROW = ("target_fingerprint", "head_fingerprint", "machine", "dtype")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one K in one place, over its repeats."""

    dataset: str
    concurrency: int | None
    rate: float | None
    method: str
    num_draft_tokens: int
    engine: str
    results: tuple[tuple[int, Json], ...]
    """(repeat, result), by repeat."""
    timed: Json | None = None
    """Steps of a run in which phases were timed apart."""
    spread: Spread | None = None
    """What repeats differ by, over all rows of the same load; counts where this row has few of its own."""
    paired: Spread | None = None
    """The same without what slowed whole repeats: of ratios."""

    @property
    def label(self) -> str:
        """Method and K, and the endpoint where there is one."""
        name = label_of(self.method, self.num_draft_tokens)
        return name if self.engine == "local" else f"{name} @ {self.engine}"

    @property
    def place(self) -> tuple[str, int | None, float | None]:
        """Data set and load."""
        return (self.dataset, self.concurrency, self.rate)

    @property
    def load(self) -> tuple[int | None, float | None]:
        """Concurrency and rate."""
        return (self.concurrency, self.rate)

    @property
    def series(self) -> str:
        """What a line of a plot stands for: the method, whatever its K."""
        return self.method if self.engine == "local" else f"{self.method} @ {self.engine}"

    @property
    def throughput(self) -> Estimate:
        """Output tokens a second."""
        return geometric_interval(self.speeds, self.spread)

    @property
    def speeds(self) -> list[float]:
        """Output tokens a second of each repeat."""
        return [result["output_tokens_per_second"] for _, result in self.results]

    def mean(self, *path: str) -> float | None:
        """Return the mean over repeats of a number inside the results; None where none has it."""
        found = [
            value for value in (_inside(result, path) for _, result in self.results) if value is not None
        ]
        return fmean(found) if found else None

    def phase(self, name: str) -> float | None:
        """Return a phase's time a step in ms, from a run that timed phases where there is one.

        How much of a step is prefill depends on how long answers are, and every run tells it: its own counts.
        """
        own = self.mean("steps", name)
        if self.timed is None or (name == "prefill_ms" and own is not None):
            return own
        return _inside(self.timed, (name,))

    def positions(self, name: str) -> list[float]:
        """Return the mean over repeats of a list of `acceptance`."""
        lists = [part for _, result in self.results if (part := result.get("acceptance", {}).get(name))]
        return [fmean(column) for column in zip(*lists, strict=True)] if lists else []


@dataclass(frozen=True, slots=True)
class Lead:
    """Why one method is faster than another in one place; every factor above 1 is in favour of `left`."""

    left: str
    right: str
    ratio: Estimate
    acceptance: float | None
    step_time: float | None
    batch: float | None
    phase: str | None
    """The phase of the step whose times differ most."""
    phase_ms: tuple[float, float] | None
    """Its time a step, left and right."""
    reason: str


def read_cells(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of records; DataError where cells are mixed that do not compare."""
    lines = [line for line in read_records(paths) if line["type"] == "cell"]
    if not lines:
        raise DataError(f"{', '.join(map(str, paths))}: no cell was measured yet")
    grouped: dict[tuple[Any, ...], list[Json]] = {}
    timed: dict[tuple[Any, ...], Json] = {}
    for line in lines:
        _check(line)
        cell = line["cell"]
        key = tuple(
            cell[name] for name in ("dataset", "concurrency", "rate", "method", "num_draft_tokens", "engine")
        )
        if cell.get("phases"):
            timed[key] = timed[key[1:]] = line["result"].get("steps") or {}
        else:
            grouped.setdefault(key, []).append(line)
    _same([line["cell"] for line in lines], SAME_EVERYWHERE)
    rows = []
    for key, members in grouped.items():
        _same([line["cell"] for line in members], SAME_IN_A_ROW)
        # The last line of a repeat counts, should one be there twice.
        results = {line["cell"]["repeat"]: line["result"] for line in members}
        in_order = tuple(sorted(results.items()))
        dataset, concurrency, rate, method, k, engine = key
        # What verifying and drafting take hardly depends on the data: one data set's stand for the others'.
        phases = timed.get(key, timed.get(key[1:]))
        rows.append(Row(dataset, concurrency, rate, method, k, engine, in_order, phases))
    return _with_spreads(rows)


def _with_spreads(rows: Sequence[Row]) -> list[Row]:
    """The rows with what repeats differ by, over all that were measured under the same load."""
    spreads = {}
    for load in {row.load for row in rows}:
        here = [row for row in rows if row.load == load]
        tables = []
        for dataset in {row.dataset for row in here}:
            own = [row for row in here if row.dataset == dataset]
            most = max(len(row.results) for row in own)
            tables.append([row.speeds for row in own if len(row.results) == most])
        spreads[load] = (pooled_spread(row.speeds for row in here), paired_spread(tables))
    return [replace(row, spread=spreads[row.load][0], paired=spreads[row.load][1]) for row in rows]


def _check(line: Json) -> None:
    """DataError for a cell that a hand has changed, or in which nothing was generated."""
    cell: Any = line.get("cell")
    result: Any = line.get("result")
    good = (
        isinstance(cell, dict)
        and isinstance(result, dict)
        and all(isinstance(cell.get(name), str) for name in ("dataset", "method", "engine"))
        and all(isinstance(cell.get(name), int) for name in ("num_draft_tokens", "repeat"))
        and all(isinstance(cell.get(name, ""), int | float | None) for name in ("concurrency", "rate"))
    )
    if not good:
        raise DataError(f"not a cell of `eyas bench sweep`; remove its line from the record: {line}"[:300])
    speed = result.get("output_tokens_per_second")
    if not cell.get("phases") and not (isinstance(speed, int | float) and speed > 0):
        raise DataError(f"output_tokens_per_second={speed!r}; remove its line from the record: {cell}"[:300])


def best_rows(rows: Iterable[Row]) -> list[Row]:
    """Return, for each place and series, the row of highest throughput, in the order of appearance."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.place, row.series)
        if key not in best or row.throughput.value > best[key].throughput.value:
            best[key] = row
    return list(best.values())


def lead(left: Row, right: Row) -> Lead:
    """Compare two rows of one place, repeat by repeat.

    Example: tokens a second 150 over 100 with 3.0 and 2.5 tokens a forward and steps of 2.0 and 2.5 ms, batch
    1 both: ratio 1.5 = acceptance 1.2 * step time 1.25 * batch 1.0.
    """
    both = sorted({repeat for repeat, _ in left.results} & {repeat for repeat, _ in right.results})
    a, b = ([dict(row.results)[repeat] for repeat in both] for row in (left, right))
    if both:
        speeds = [[result["output_tokens_per_second"] for result in part] for part in (a, b)]
        ratio = ratio_interval(speeds[0], speeds[1], left.paired)
    else:
        ratio = Estimate(left.throughput.value / right.throughput.value, None, None, 0)
    acceptance = _factor(a, b, ("steps", "tokens_per_forward"))
    batch = _factor(a, b, ("steps", "rows_per_step"))
    step_time = _factor(b, a, ("steps", "step_ms"))
    if acceptance is None and (own := _length(left)) and (other := _length(right)):
        acceptance, batch = own / other, None
        step_time = ratio.value / acceptance
    phase, times = _phase(left, right)
    reason = _reason(left, right, ratio, acceptance, step_time, batch, phase, times)
    return Lead(left.label, right.label, ratio, acceptance, step_time, batch, phase, times, reason)


def leaders(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], Lead]]:
    """Return for each place why the fastest series leads the next one; nothing where there is only one."""
    found = []
    best = best_rows(rows)
    for place in dict.fromkeys(row.place for row in best):
        here = sorted((row for row in best if row.place == place), key=lambda row: -row.throughput.value)
        if len(here) > 1:
            found.append((place, lead(here[0], here[1])))
    return found


def versus(rows: Sequence[Row], left: str, right: str) -> list[tuple[tuple[Any, ...], Lead]]:
    """Return `left` over `right`, each at its best K, for each place that has both series."""
    best = {(row.place, row.series): row for row in best_rows(rows)}
    places = dict.fromkeys(row.place for row in rows)
    return [
        (place, lead(best[place, left], best[place, right]))
        for place in places
        if (place, left) in best and (place, right) in best
    ]


def acceptance_by_k(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, float]]]:
    """Return data set -> series -> K -> acceptance length, all loads together.

    1 + all accepted drafts / all verifications, so a load counts as much as it verified.
    """
    sums: dict[tuple[str, str, int], tuple[float, float]] = {}
    for row in rows:
        for _, result in row.results:
            part = result.get("acceptance") or {}
            if not part or row.num_draft_tokens <= 0:
                continue
            key = (row.dataset, row.series, row.num_draft_tokens)
            accepted, drafts = sums.get(key, (0.0, 0.0))
            sums[key] = (accepted + part["num_accepted"], drafts + part["num_drafts"])
    found: dict[str, dict[str, dict[int, float]]] = {}
    for (dataset, series, k), (accepted, drafts) in sorted(sums.items()):
        found.setdefault(dataset, {}).setdefault(series, {})[k] = 1 + accepted / drafts
    return found


def tables(rows: Sequence[Row]) -> Json:
    """Return everything above as plain JSON values."""
    best = best_rows(rows)
    chosen = {id(row) for row in best}
    plain = {row.place: row for row in best if row.method == PLAIN and row.engine == "local"}
    listed = []
    for row in rows:
        throughput = row.throughput
        listed.append(
            {
                **_place(row.place),
                "method": row.method,
                "num_draft_tokens": row.num_draft_tokens,
                "engine": row.engine,
                "best_k": id(row) in chosen,
                "tokens_per_second": asdict(throughput),
                "over_plain": asdict(lead(row, plain[row.place]).ratio) if row.place in plain else None,
                "acceptance_length": row.mean("acceptance", "acceptance_length"),
                "acceptance_by_position": row.positions("acceptance_by_position"),
                "conditional_acceptance_by_position": row.positions("conditional_acceptance_by_position"),
                "tokens_per_forward": row.mean("steps", "tokens_per_forward"),
                "step_ms": row.mean("steps", "step_ms"),
                **{name: row.phase(name) for name in PHASES},
                **{
                    f"{name}_{which}": row.mean(f"{name}_ms", which)
                    for name in ("ttft", "tpot", "itl")
                    for which in ("p50", "p99")
                },
            }
        )
    return {
        "rows": listed,
        "leaders": [_lead_json(place, one) for place, one in leaders(rows)],
        "peagle_over_eagle3": [
            _lead_json(place, one) | {"published": published_ratio(place[0], place[1])}
            for place, one in versus(rows, "peagle", "eagle3")
        ],
        "acceptance_length_by_k": acceptance_by_k(rows),
    }


def _lead_json(place: tuple[Any, ...], one: Lead) -> Json:
    return _place(place) | asdict(one)


def _place(place: tuple[Any, ...]) -> Json:
    return {"dataset": place[0], "concurrency": place[1], "rate": place[2]}


def _same(cells: Sequence[Json], names: Sequence[str]) -> None:
    for name in names:
        values = {str(cell.get(name)) for cell in cells}
        if len(values) > 1:
            where = (
                f"{cells[0]['method']} on {cells[0]['dataset']}" if name in SAME_IN_A_ROW else "the records"
            )
            raise DataError(
                f"{where}: cells with different {name} do not compare ({', '.join(sorted(values))}); "
                "report them apart"
            )


def _inside(value: Any, path: Sequence[str]) -> float | None:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else float(value)


def _factor(over: Sequence[Json], under: Sequence[Json], path: Sequence[str]) -> float | None:
    """Return the geometric mean of paired ratios of a number; None where any lacks it."""
    pairs = [(_inside(a, path), _inside(b, path)) for a, b in zip(over, under, strict=True)]
    if not pairs or any(not a or not b for a, b in pairs):
        return None
    return exp(fmean(log(a / b) for a, b in pairs if a and b))


def _length(row: Row) -> float | None:
    """Return tokens a forward as far as drafts tell: 1 for plain decoding."""
    return 1.0 if row.method == PLAIN else row.mean("acceptance", "acceptance_length")


def _phase(left: Row, right: Row) -> tuple[str | None, tuple[float, float] | None]:
    """Return the phase whose time a step differs most, and its two times in ms.

    None where either was never timed by phase: what is known then need not be what differs.
    """
    pairs = {name: (left.phase(name), right.phase(name)) for name in PHASES}
    known = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    if "verify_ms" not in known:
        return None, None
    name = max(known, key=lambda phase: abs(known[phase][0] - known[phase][1]))
    return name.removesuffix("_ms"), known[name]


def _reason(
    left: Row,
    right: Row,
    ratio: Estimate,
    acceptance: float | None,
    step_time: float | None,
    batch: float | None,
    phase: str | None,
    times: tuple[float, float] | None,
) -> str:
    """Say in one sentence what the factors say in numbers."""
    ahead = "leads" if ratio.value >= 1 else "trails"
    open_question = ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high
    text = f"{left.label} {ahead} {right.label} {ratio.value:.2f}x"
    if open_question:
        text += " (within the interval of no difference)"
    if acceptance is None or step_time is None:
        return f"{text}; the records do not tell steps or acceptance"
    parts = {
        f"{acceptance:.2f}x from acceptance": acceptance,
        f"{step_time:.2f}x from step time": step_time,
    }
    if batch is not None and abs(batch - 1) >= 0.02:
        parts[f"{batch:.2f}x from how full the batch was"] = batch
    ordered = sorted(parts, key=lambda name: -abs(log(parts[name])))
    text += f": {', '.join(ordered)}"
    if phase is not None and times is not None:
        text += f" ({phase} takes {times[0]:.2f} ms a step against {times[1]:.2f})"
    return text
