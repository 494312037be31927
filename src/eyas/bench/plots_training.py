"""The figure of timed training steps: `python -m eyas.bench.plots_training RECORDS.jsonl ... --out FILE.png`.

RECORDS are what `python -m eyas.training.speed` prints. Tokens a second and peak memory are drawn against the
length of a row n, a line for each way of attention and number of parts S, and against S, a line for each n.
Dotted: the memory that was predicted. A cross at the bottom: a case that ran out of memory.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.bench.plots import COLOURS, panels
from eyas.core.errors import ConfigError

Record = dict[str, Any]
VALUES = {"tokens/s": "tokens_per_second", "peak GiB": "peak_gib"}


def draw_training(records: Sequence[Record]) -> bytes:
    """Return a PNG of the records; ConfigError where none of them was timed."""
    known = [record for record in records if "way" in record]
    timed = [record for record in known if "tokens_per_second" in record]
    if not timed:
        raise ConfigError(
            "no timed training step among the records; python -m eyas.training.speed makes them"
        )
    names = [
        f"{objective}: {value} against {axis}"
        for objective in dict.fromkeys(record["objective"] for record in timed)
        for axis in ("n", "S")
        for value in VALUES
        if axis == "n" or any(r["objective"] == objective and r["num_parts"] > 1 for r in timed)
    ]

    def panel(axes: Any, name: str) -> None:
        objective, _, rest = name.partition(": ")
        value, _, axis = rest.partition(" against ")
        own = [record for record in known if record["objective"] == objective]
        if axis == "S":
            own = [record for record in own if record["way"] == "staircase"]
        where = "length" if axis == "n" else "num_parts"
        for number, (label, line) in enumerate(_lines(own, axis).items()):
            _line(axes, line, where, VALUES[value], label, COLOURS[number % len(COLOURS)])
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens in a row, n" if axis == "n" else "parts of a row, S")
        axes.set_ylabel(value)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)

    return panels(names, panel)


def _lines(records: Sequence[Record], axis: str) -> dict[str, list[Record]]:
    """Label -> its records in order; the same case measured twice counts with its newest record."""
    lines: dict[str, dict[int, Record]] = {}
    for record in records:
        parts, mode, weights = record.get("num_parts", 1), record.get("partition_mode"), record["weights"]
        cut = f", S = {parts}, {mode}" if parts > 1 else ""
        if axis == "n":
            lines.setdefault(f"{record['way']}{cut}, {weights}", {})[record["length"]] = record
        else:
            # One part is where every mode begins.
            modes = [mode] if parts > 1 else _modes(records, record)
            for name in modes:
                lines.setdefault(f"n = {record['length']:,}, {name}, {weights}", {})[parts] = record
    return {label: [line[key] for key in sorted(line)] for label, line in lines.items()}


def _modes(records: Sequence[Record], one: Record) -> list[str]:
    alike = [r for r in records if (r["length"], r["weights"]) == (one["length"], one["weights"])]
    return list(dict.fromkeys(r["partition_mode"] for r in alike if r.get("num_parts", 1) > 1))


def _line(axes: Any, line: Sequence[Record], where: str, what: str, label: str, colour: str) -> None:
    there = [record for record in line if record.get(what) is not None]
    axes.plot(
        [r[where] for r in there], [r[what] for r in there], "o-", color=colour, label=label, markersize=4
    )
    failed = [record[where] for record in line if record.get("error") == "out of memory"]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=colour, clip_on=False)
    predicted = [record for record in there if "predicted_gib" in record]
    if what == "peak_gib" and predicted:
        sizes = [record["predicted_gib"]["total"] for record in predicted]
        axes.plot([r[where] for r in predicted], sizes, ":", color=colour, linewidth=1)


def main(arguments: list[str] | None = None) -> None:
    """Read files of records and write the figure."""
    parser = argparse.ArgumentParser(description="Draw timed training steps.")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    records = []
    for path in args.records:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
            except ValueError:
                raise ConfigError(f"{path}:{number}: not JSON: {line[:80]!r}") from None
            records += [record] if isinstance(record, dict) else []
    args.out.write_bytes(draw_training(records))


if __name__ == "__main__":
    main()
