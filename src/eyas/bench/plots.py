"""The figures of a sweep, drawn with matplotlib into PNG bytes; nothing is shown, no window is opened.

throughput    tokens a second against load, each method at its best K, with 95 % intervals
ratio         P-EAGLE over EAGLE-3, each at its best K, and the source's own figures beside
acceptance    tokens a verification against K
positions     acceptance by position, and given that the position before was accepted
step          where a step's time goes, by phase
latency       time to first token and gap between deliveries against load
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

from eyas.bench.analyze_sweep import PHASES, Row, acceptance_by_k, best_rows, versus
from eyas.bench.cells import AUTO, PLAIN
from eyas.bench.sources import ACCEPTANCE_LENGTH, CONCURRENCIES, PEAGLE_OVER_EAGLE3, source_name
from eyas.core.errors import ConfigError

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
FIXED = {"plain": "#6b6b6b", "eagle3": "#1f77b4", "peagle": "#d62728"}
PHASE_COLOURS = {
    "verify_ms": "#4c78a8",
    "draft_ms": "#f58518",
    "prefill_ms": "#54a24b",
    "other_ms": "#b0b0b0",
}


def draw_all(rows: Sequence[Row]) -> dict[str, bytes]:
    """Return name -> PNG of every figure that the rows have something for."""
    pyplot()
    figures: dict[str, Callable[[Sequence[Row]], bytes | None]] = {
        "throughput": throughput,
        "speedup": speedup,
        "ratio": ratio,
        "acceptance": acceptance,
        "positions": positions,
        "step": step_time,
        "latency": latency,
    }
    drawn = {name: draw(rows) for name, draw in figures.items()}
    return {name: png for name, png in drawn.items() if png is not None}


def throughput(rows: Sequence[Row]) -> bytes | None:
    """Draw tokens a second against load, a panel for each data set."""
    best = best_rows(rows)
    colours = _colours(best)

    def panel(axes: Any, dataset: str) -> None:
        for series in dict.fromkeys(row.series for row in best):
            line = _along(best, dataset, series)
            if not line:
                continue
            x = [_load(row) for row in line]
            y = [row.throughput.value for row in line]
            axes.plot(x, y, "o-", color=colours[series], label=series, markersize=4)
            spread = [row.throughput for row in line]
            low = [one.value if one.low is None else max(one.low, 0.0) for one in spread]
            high = [one.value if one.high is None else one.high for one in spread]
            axes.fill_between(x, low, high, color=colours[series], alpha=0.15, linewidth=0)
            for at, value, row in zip(x, y, line, strict=True):
                if row.num_draft_tokens:
                    axes.annotate(
                        "auto" if row.num_draft_tokens == AUTO else str(row.num_draft_tokens),
                        (at, value),
                        textcoords="offset points",
                        xytext=(0, 5),
                        ha="center",
                        fontsize=6,
                        color=colours[series],
                    )
        _load_axis(axes, best, dataset)
        _log(axes)
        axes.set_ylabel("output tokens a second (numbers: best K)")
        axes.legend(fontsize=7)

    return panels(_datasets(best), panel)


def speedup(rows: Sequence[Row]) -> bytes | None:
    """Draw each method at its best K over plain decoding, against load."""
    names = [series for series in dict.fromkeys(row.series for row in rows) if series != PLAIN]
    found = {series: over for series in names if (over := versus(rows, series, PLAIN))}
    if not found:
        return None
    colours = _colours(rows)

    def panel(axes: Any, dataset: str) -> None:
        ticks: set[float] = set()
        for series, over in found.items():
            here = [
                (load or rate or 0.0, one.ratio.value) for (name, load, rate), one in over if name == dataset
            ]
            if not here:
                continue
            here.sort()
            axes.plot(*zip(*here, strict=True), "o-", color=colours[series], label=series, markersize=4)
            ticks.update(at for at, _ in here)
        axes.axhline(1.0, color="black", linewidth=0.8)
        _log2(axes, sorted(ticks))
        axes.set_xlabel("concurrency, or requests a second")
        axes.set_ylabel("tokens a second over plain decoding")
        axes.legend(fontsize=7)

    return panels(list(dict.fromkeys(place[0] for over in found.values() for place, _ in over)), panel)


def ratio(rows: Sequence[Row]) -> bytes | None:
    """Draw P-EAGLE over EAGLE-3 against concurrency, measured and published."""
    pairs = [(place, one) for place, one in versus(rows, "peagle", "eagle3") if place[1] is not None]
    if not pairs:
        return None

    def panel(axes: Any, dataset: str) -> None:
        here = sorted((place[1] or 0, one.ratio) for place, one in pairs if place[0] == dataset)
        x = [at for at, _ in here]
        values = [one.value for _, one in here]
        low = [one.value - (one.value if one.low is None else one.low) for _, one in here]
        high = [(one.value if one.high is None else one.high) - one.value for _, one in here]
        axes.errorbar(
            x, values, yerr=[low, high], fmt="o-", color="#d62728", capsize=3, label="measured here"
        )
        name = source_name(dataset)
        if name is not None:
            published = PEAGLE_OVER_EAGLE3[name]
            axes.plot(CONCURRENCIES, published, "s--", color="#888888", markersize=4, label=f"source, {name}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        _log2(axes, sorted({*x, *(CONCURRENCIES if name else ())}))
        axes.set_xlabel("concurrency")
        axes.set_ylabel("P-EAGLE / EAGLE-3, tokens a second")
        axes.legend(fontsize=7)

    return panels(list(dict.fromkeys(place[0] for place, _ in pairs)), panel)


def acceptance(rows: Sequence[Row]) -> bytes | None:
    """Draw the acceptance length against K, measured and published."""
    table = acceptance_by_k(rows)
    if not table:
        return None
    colours = _colours(rows)

    def panel(axes: Any, dataset: str) -> None:
        for series, by_k in table[dataset].items():
            axes.plot(
                list(by_k), list(by_k.values()), "o-", color=colours[series], label=series, markersize=4
            )
        name = source_name(dataset)
        for method, by_k in ACCEPTANCE_LENGTH.get(name or "", {}).items():
            if any(method in series for series in table[dataset]):
                colour = FIXED.get(method, "#888888")
                axes.plot(
                    list(by_k),
                    list(by_k.values()),
                    "s--",
                    color=colour,
                    alpha=0.45,
                    label=f"source, {method}",
                )
        axes.set_xticks(sorted({k for by_k in table[dataset].values() for k in by_k}))
        axes.set_xlabel("K, drafts a step")
        axes.set_ylabel("tokens a verification")
        axes.legend(fontsize=7)

    return panels(list(table), panel)


def positions(rows: Sequence[Row]) -> bytes | None:
    """Draw acceptance by position at each method's largest K, unconditional and conditional."""
    drafted = [row for row in rows if row.positions("acceptance_by_position")]
    if not drafted:
        return None
    colours = _colours(rows)

    def panel(axes: Any, dataset: str) -> None:
        here = [row for row in drafted if row.dataset == dataset]
        for series in dict.fromkeys(row.series for row in here):
            own = max((row for row in here if row.series == series), key=lambda row: row.num_draft_tokens)
            values = own.positions("acceptance_by_position")
            given = own.positions("conditional_acceptance_by_position")
            x = range(1, len(values) + 1)
            axes.plot(x, values, "o-", color=colours[series], label=own.label, markersize=4)
            axes.plot(x, given, "o:", color=colours[series], label="given the one before", markersize=3)
        axes.set_ylim(0, 1)
        axes.set_xlabel("position")
        axes.set_ylabel("accepted")
        axes.legend(fontsize=7)

    return panels(_datasets(drafted), panel)


def step_time(rows: Sequence[Row]) -> bytes | None:
    """Draw the time of a step by phase, each method at its best K, as stacked bars."""
    best = [row for row in best_rows(rows) if row.phase("verify_ms") is not None]
    if not best:
        return None

    def panel(axes: Any, dataset: str) -> None:
        here = sorted(
            (row for row in best if row.dataset == dataset), key=lambda row: (_load(row), row.series)
        )
        names = [f"{_load(row):g}\n{row.label}" for row in here]
        bottom = [0.0] * len(here)
        for phase in PHASES:
            height = [row.phase(phase) or 0.0 for row in here]
            axes.bar(
                range(len(here)),
                height,
                bottom=bottom,
                color=PHASE_COLOURS[phase],
                label=phase.removesuffix("_ms"),
            )
            bottom = [a + b for a, b in zip(bottom, height, strict=True)]
        axes.set_xticks(range(len(here)), names, fontsize=5, rotation=90)
        axes.set_ylabel("ms a step")
        axes.legend(fontsize=7)

    return panels(_datasets(best), panel)


def latency(rows: Sequence[Row]) -> bytes | None:
    """Draw time to first token and the gap between deliveries against load, medians and 99th percentiles."""
    best = [row for row in best_rows(rows) if row.mean("ttft_ms", "p50") is not None]
    if not best:
        return None
    colours = _colours(best)

    def panel(axes: Any, name: str) -> None:
        dataset, metric = name.rsplit(": ", 1)
        for series in dict.fromkeys(row.series for row in best):
            line = [r for r in _along(best, dataset, series) if r.mean(f"{metric}_ms", "p50") is not None]
            x = [_load(row) for row in line]
            for which, style in (("p50", "o-"), ("p99", "^:")):
                y = [row.mean(f"{metric}_ms", which) for row in line]
                axes.plot(x, y, style, color=colours[series], label=f"{series} {which}", markersize=4)
        _load_axis(axes, best, dataset)
        _log(axes)
        axes.set_ylabel(f"{metric}, ms")
        axes.legend(fontsize=6)

    names = [f"{dataset}: {metric}" for dataset in _datasets(best) for metric in ("ttft", "itl")]
    return panels(names, panel)


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files only; ConfigError if it is not installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'eyas[bench]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def panels(names: Sequence[str], panel: Callable[[Any, str], None]) -> bytes:
    """Return a figure with one panel for each name, at most three beside one another."""
    plt = pyplot()
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.8 * columns, 3.8 * lines), squeeze=False, constrained_layout=True
    )
    try:
        for axes in grid.flat[len(names) :]:
            axes.set_axis_off()
        for name, axes in zip(names, grid.flat, strict=False):
            axes.set_title(name, fontsize=9)
            axes.grid(visible=True, alpha=0.25)
            panel(axes, name)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
        return buffer.getvalue()
    finally:
        plt.close(figure)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    """Return series -> colour; the three methods that reports are about always have theirs."""
    spare = iter(COLOURS * 9)
    taken = set(FIXED.values())
    found = {}
    for series in dict.fromkeys(row.series for row in rows):
        found[series] = FIXED.get(series) or next(one for one in spare if one not in taken)
    return found


def _along(rows: Sequence[Row], dataset: str, series: str) -> list[Row]:
    own = [row for row in rows if row.dataset == dataset and row.series == series]
    return sorted(own, key=_load)


def _datasets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.dataset for row in rows))


def _load(row: Row) -> float:
    return float(row.concurrency if row.concurrency is not None else row.rate or 0.0)


def _load_axis(axes: Any, rows: Sequence[Row], dataset: str) -> None:
    here = [row for row in rows if row.dataset == dataset]
    axes.set_xlabel("concurrency" if here[0].rate is None else "requests a second")
    _log2(axes, sorted({_load(row) for row in here}))


def _log(axes: Any) -> None:
    """A logarithmic axis with plain numbers, also between powers of ten where there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _log2(axes: Any, ticks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
