"""`eyas bench report`: one HTML page that needs nothing else, and its figures as files beside it.

Figures are embedded, styles are inline, there is no script; the page opens from a disk without a network.
"""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.bench.analyze_sweep import Row, read_cells, tables
from eyas.bench.cells import AUTO
from eyas.bench.plots import draw_all
from eyas.bench.sources import ACCEPTANCE_LENGTH, CONCURRENCIES, PEAGLE_OVER_EAGLE3, SOURCE
from eyas.bench.sweep import read_records

INTRODUCTION = (
    "Throughput is taken over the time in which all places of a fixed concurrency were filled. Intervals are "
    "95 % of Student's t over repeats, on logarithms; where a cell has few, with the spread of all cells of "
    "that load. Methods took turns, and ratios are of paired repeats. "
    "Acceptance length counts tokens a verification, the target's own included."
)
IDENTITY = (
    "Tokens a second are requests a step times tokens a forward over seconds a step, so the ratio of two "
    "methods is the product of the ratios of these three."
)
TITLES = {
    "throughput": "Throughput against load, each method at its best K",
    "speedup": "Throughput over plain decoding",
    "ratio": "P-EAGLE over EAGLE-3, each at its best K",
    "acceptance": "Acceptance length against K",
    "positions": "Acceptance by position",
    "step": "Where the time of a step goes",
    "latency": "Latency against load",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
img { max-width: 100%; background: white; border-radius: 4px; }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
th:first-child, td:first-child, .text { text-align: left; }
tr.best { font-weight: 600; }
small, caption { opacity: .75; } caption { text-align: left; }
"""  # noqa: E501 -- CSS


def write_report(records: Sequence[Path], out_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Write index.html, the PNGs and tables.json to out_dir; return the page's path and the tables."""
    rows = read_cells(records)
    document = tables(rows)
    figures = draw_all(rows)
    runs = [line["provenance"] for line in read_records(records) if line["type"] == "run"]
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, png in figures.items():
        _write(out_dir / f"{name}.png", png)
    _write(out_dir / "tables.json", json.dumps(document, indent=1).encode())
    page = out_dir / "index.html"
    html_text = page_of(document, figures, setup_of(records, rows), runs, cut_off(records))
    _write(page, html_text.encode())
    return page, document


def setup_of(records: Sequence[Path], rows: Sequence[Row]) -> dict[str, str]:
    """Return what all cells have in common, in words."""
    cells = [line["cell"] for line in read_records(records) if line["type"] == "cell"]

    def words(name: str) -> str:
        return ", ".join(dict.fromkeys(str(cell[name]) for cell in cells))

    return {
        "target": words("target"),
        "machine": words("machine"),
        "type": words("dtype"),
        "temperature": words("temperature"),
        "longest answer": f"{words('max_tokens')} tokens",
        "data": ", ".join(dict.fromkeys(row.dataset for row in rows)),
        "repeats": str(max(len(row.results) for row in rows)),
    }


def cut_off(records: Sequence[Path]) -> str:
    """Return a warning if the time limit cut cells off; "" if every cell ended by itself."""
    cells = [
        line for line in read_records(records) if line["type"] == "cell" and not line["cell"].get("phases")
    ]
    cut = sum(
        line["result"].get("num_requests", 0) < line["cell"].get("num_requests", 0)
        or line["result"].get("num_completed", 0) + line["result"].get("num_errors", 0)
        < line["result"].get("num_requests", 0)
        for line in cells
    )
    if not cut:
        return ""
    return (
        f"The time limit cut {cut} of {len(cells)} cells off. A faster method answered more of the prompts "
        "there, so acceptance is not of the same text everywhere. Measure fewer requests without a limit."
    )


def page_of(
    document: dict[str, Any],
    figures: dict[str, bytes],
    setup: dict[str, str],
    runs: Sequence[dict[str, Any]],
    cut_off: str = "",
) -> str:
    """Return the page's HTML; `cut_off` is a warning of what the time limit did, if it did."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>Decoding speed: {_text(setup['target'])}</title><style>{STYLE}</style>",
        f"<h1>Decoding speed: {_text(setup['target'])}</h1>",
        _table(["setting", "value"], list(setup.items())),
        f"<p>{_text(INTRODUCTION)}</p>",
        _verdict(document),
        f"<p><strong>{_text(cut_off)}</strong></p>" if cut_off else "",
    ]
    for name, png in figures.items():
        data = base64.b64encode(png).decode("ascii")
        alt = _text(TITLES[name])
        parts.append(f'<h2>{alt}</h2><img alt="{alt}" src="data:image/png;base64,{data}">')
        if name == "ratio":
            parts.append(_ratios(document) + f"<p><small>Source: {_text(SOURCE)}.</small></p>")
        if name == "acceptance":
            parts.append(_lengths(document))
    parts += [
        "<h2>Why one method leads</h2>",
        f"<p>{IDENTITY}</p>",
        _leads(document["leaders"]),
        "<h2>All measurements</h2>",
        _rows(document["rows"]),
        "<h2>How it was measured</h2>",
        _provenance(runs),
        "</html>",
    ]
    return "\n".join(parts)


def _verdict(document: dict[str, Any]) -> str:
    """Say where drafting pays: every method at its best K against plain decoding."""
    best = [
        row for row in document["rows"] if row["best_k"] and row["over_plain"] and row["method"] != "plain"
    ]
    items = []
    for method in dict.fromkeys(row["method"] for row in best):
        own = [row for row in best if row["method"] == method]
        ratios = [row["over_plain"]["value"] for row in own]
        above = sum(value > 1 for value in ratios)
        text = f"{method}: above plain decoding in {above} of {len(own)} places, {min(ratios):.2f}x to "
        items.append(f"<li>{_text(text + f'{max(ratios):.2f}x')}</li>")
    pairs = [one["ratio"]["value"] for one in document["peagle_over_eagle3"]]
    if pairs:
        above = sum(value > 1 for value in pairs)
        text = f"P-EAGLE over EAGLE-3: above in {above} of {len(pairs)} places, {min(pairs):.2f}x to "
        items.append(f"<li>{text}{max(pairs):.2f}x</li>")
    return "" if not items else f"<ul>{''.join(items)}</ul>"


def _ratios(document: dict[str, Any]) -> str:
    head = [
        "data",
        "load",
        "P-EAGLE",
        "EAGLE-3",
        "ratio",
        "95 %",
        "source",
        "acceptance",
        "step time",
        "batch",
    ]
    lines = [
        [
            one["dataset"],
            _place(one),
            one["left"],
            one["right"],
            _number(one["ratio"]["value"]),
            _interval(one["ratio"]),
            _number(one["published"]),
            _number(one["acceptance"]),
            _number(one["step_time"]),
            _number(one["batch"]),
        ]
        for one in document["peagle_over_eagle3"]
    ]
    return _ratio_grid(document) + _table(head, lines) + _leads(document["peagle_over_eagle3"], listed=True)


def _ratio_grid(document: dict[str, Any]) -> str:
    """A line for each data set, a column for each concurrency; the source's lines below."""
    own: dict[str, dict[int, float]] = {}
    for one in document["peagle_over_eagle3"]:
        if one["concurrency"] is not None:
            own.setdefault(one["dataset"], {})[one["concurrency"]] = one["ratio"]["value"]
    published = {
        f"{name} (source)": dict(zip(CONCURRENCIES, r, strict=True)) for name, r in PEAGLE_OVER_EAGLE3.items()
    }
    lines = own | published
    loads = sorted({load for line in lines.values() for load in line})
    return _table(
        ["P-EAGLE / EAGLE-3", *(f"c={load}" for load in loads)],
        [[name, *(_number(line.get(load)) for load in loads)] for name, line in lines.items()],
    )


def _lengths(document: dict[str, Any]) -> str:
    """A line for each data set and method, a column for each K; the source's lines below."""
    lines = {
        (name + note, method): by_k
        for table, note in ((document["acceptance_length_by_k"], ""), (ACCEPTANCE_LENGTH, " (source)"))
        for name, by_method in table.items()
        for method, by_k in by_method.items()
    }
    counts = sorted({k for by_k in lines.values() for k in by_k})
    return _table(
        ["tokens a verification", "method", *(f"K={k}" for k in counts)],
        [[*names, *(_number(by_k.get(k)) for k in counts)] for names, by_k in lines.items()],
        text=(0, 1),
    )


def _leads(leads: Sequence[dict[str, Any]], *, listed: bool = False) -> str:
    if listed:
        items = "".join(
            f"<li>{_text(one['dataset'])} {_place(one)}: {_text(one['reason'])}</li>" for one in leads
        )
        return f"<ul>{items}</ul>"
    return _table(
        ["data", "load", "why"],
        [[one["dataset"], _place(one), one["reason"]] for one in leads],
        text=(0, 1, 2),
    )


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    head = ["data", "load", "method", "K", "tok/s", "95 %", "over plain", "AL", "step ms", "verify", "draft"]
    head += ["prefill", "other", "ttft p50", "ttft p99", "itl p50", "itl p99"]
    lines = []
    for row in rows:
        line = [row["dataset"], _place(row), _series(row), k_of(row["num_draft_tokens"])]
        line += [f"{row['tokens_per_second']['value']:.0f}", _interval(row["tokens_per_second"], digits=0)]
        line += [_number(row["over_plain"]["value"] if row["over_plain"] else None)]
        names = ("acceptance_length", "step_ms", "verify_ms", "draft_ms", "prefill_ms", "other_ms")
        line += [_number(row[name]) for name in (*names, "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")]
        lines.append(line)
    return _table(head, lines, bold=[row["best_k"] for row in rows])


def _provenance(runs: Sequence[dict[str, Any]]) -> str:
    items = []
    for run in runs:
        versions = ", ".join(f"{name} {one}" for name, one in run.get("versions", {}).items() if one)
        text = f"{run.get('time')}: {run.get('command')} (commit {run.get('commit')}; {versions})"
        items.append(f"<li><code>{_text(text)}</code></li>")
    return f"<ul>{''.join(items)}</ul>"


def _table(
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    text: Sequence[int] = (),
    bold: Sequence[bool] = (),
) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        marks = [" class=text" if i in text else "" for i in range(len(values))]
        return "".join(f"<{tag}{m}>{_text(v)}</{tag}>" for m, v in zip(marks, values, strict=True))

    marks = [*bold, *[False] * (len(lines) - len(bold))]
    body = "".join(
        f"<tr{' class=best' if mark else ''}>{cells('td', line)}</tr>"
        for mark, line in zip(marks, lines, strict=True)
    )
    return f"<div class=scroll><table><tr>{cells('th', head)}</tr>{body}</table></div>"


def k_of(num_draft_tokens: int) -> str:
    """Return K as a table shows it."""
    return "auto" if num_draft_tokens == AUTO else str(num_draft_tokens or "")


def _series(row: dict[str, Any]) -> str:
    return str(row["method"]) if row["engine"] == "local" else f"{row['method']} @ {row['engine']}"


def _place(one: dict[str, Any]) -> str:
    return f"c={one['concurrency']}" if one["rate"] is None else f"{one['rate']:g}/s"


def _interval(one: dict[str, Any], digits: int = 2) -> str:
    if one["low"] is None or one["high"] is None:
        return ""
    return f"{one['low']:.{digits}f} to {one['high']:.{digits}f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _text(value: Any) -> str:
    return html.escape(str(value))


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)
