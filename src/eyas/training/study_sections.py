"""A study's results for a document: a small table for each group, and a short raw log.

    python -m eyas.training.study_sections studies/choices more.jsonl --log choices.jsonl.gz > sections.md

The first argument is a study's folder (its study.json says what is held against what); further study.jsonl
files bring variants that were trained elsewhere. Each table has the group's baseline, the study's other
common variants, and the group's own.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from eyas.training.study_records import Row, last_rows, read_json

SHORT = ("variant", "state", "step", "epochs", "tokens", "flops", "head_flops", "simulated_al")
LONG = ("num_trained_parameters", "acceptance", "visited_acceptance", "device")


def sections(rows: list[Row], about: dict[str, Any]) -> str:
    """Markdown: a heading and a table for each group, in the study's order.

    rows are study.jsonl's; about is study.json: baseline, beside, and against (group -> variant).
    """
    newest = {row["variant"]: row for row in last_rows(rows)}
    groups: dict[str, list[str]] = {}
    for name in about["variants"]:
        if "/" in name and name in newest:
            groups.setdefault(name.partition("/")[0], []).append(name)
    common = [name for name in (about["baseline"], *about["beside"]) if name in newest]
    parts = [_section("both heads", common, newest, about["baseline"])] if common else []
    for group, names in groups.items():
        baseline = about.get("against", {}).get(group, about["baseline"])
        shown = [name for name in (baseline,) if name in newest]
        parts.append(_section(group, shown + names, newest, baseline))
    return "\n".join(parts)


def _section(title: str, names: list[str], newest: dict[str, Row], baseline: str | None) -> str:
    base = newest.get(baseline) if baseline is not None else None
    depths = max(len(newest[name]["visited_acceptance"]) for name in names)
    head = ["variant", "M trained", "steps", "epochs", "PFLOP", "AL", "difference"]
    lines = [[*head, *(f"v{depth}" for depth in range(depths))], ["---"] * (len(head) + depths)]
    for name in names:
        row = newest[name]
        shares = [f"{share:.3f}" for share in row["visited_acceptance"]]
        lines.append(
            [
                name + ("" if row["state"] == "finished" else f" ({row['state']})"),
                f"{row['num_trained_parameters'] / 1e6:.1f}",
                f"{row['step']:,}",
                f"{row['epochs']:.2f}",
                f"{row['flops'] / 1e15:.2f}",
                f"{row['simulated_al']:.3f}",
                "" if base is None or row is base else f"{row['simulated_al'] - base['simulated_al']:+.3f}",
                *shares,
                *[""] * (depths - len(shares)),
            ]
        )
    return f"### {title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def short_log(rows: list[Row]) -> list[Row]:
    """Rows with the fields that tables and curves need; all of them for the newest of each variant."""
    newest = {id(row) for row in last_rows(rows)}
    return [
        {key: row[key] for key in (*SHORT, *(LONG if id(row) in newest else ())) if key in row}
        for row in rows
    ]


def read_rows(path: Path) -> list[Row]:
    """The rows of a study.jsonl, packed or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def main(arguments: list[str] | None = None) -> None:
    """Print the sections; write the short log where asked."""
    parser = argparse.ArgumentParser(description="A study's tables for a document.")
    parser.add_argument("folder", type=Path, help="folder of the study")
    parser.add_argument("more", nargs="*", type=Path, help="study.jsonl of variants trained elsewhere")
    parser.add_argument("--log", type=Path, help="write a short raw log here, as .jsonl.gz")
    args = parser.parse_args(arguments)
    rows: list[Row] = []
    for path in (args.folder / "study.jsonl", *args.more):
        found = read_rows(path)
        names = {row["variant"] for row in found}
        rows = [row for row in rows if row["variant"] not in names] + found
    if args.log is not None:
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in short_log(rows))
        args.log.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    sys.stdout.write(sections(rows, read_json(args.folder / "study.json")))


if __name__ == "__main__":
    main()
