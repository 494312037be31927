"""The figures of a training study, from the rows of its study.jsonl (training/study_records.py).

epochs       simulated AL against epochs of the variant's own data
flops        simulated AL against training FLOPs, the target's forward included
acceptance   acceptance by depth at the end: over all anchors, and over those that decoding visits
"""

from collections.abc import Callable, Sequence
from typing import Any

from eyas.bench.plots import COLOURS, panels, pyplot

Row = dict[str, Any]
BASELINE_COLOUR = "#6b6b6b"


def draw_study(rows: Sequence[Row], baseline: str | None = None) -> dict[str, bytes]:
    """Return name -> PNG; empty without rows. A panel for each group, with the baseline in all."""
    pyplot()
    if not rows:
        return {}
    return {
        "epochs": _curves(rows, baseline, lambda row: float(row["epochs"]), "epochs"),
        "flops": _curves(rows, baseline, lambda row: float(row["flops"]), "training FLOPs"),
        "acceptance": _acceptance(rows, baseline),
    }


def groups(rows: Sequence[Row], baseline: str | None) -> dict[str, list[str]]:
    """Panel -> its variants. A study without groups is one panel of all.

    base, layers/1, layers/2, k/4, baseline "base" -> {layers: [base, layers/1, layers/2], k: [base, k/4]}.
    """
    names = dict.fromkeys(row["variant"] for row in rows)
    grouped: dict[str, list[str]] = {}
    for name in names:
        if name != baseline:
            grouped.setdefault(name.rpartition("/")[0], []).append(name)
    if baseline is not None and baseline in names:
        grouped = {group: [baseline, *members] for group, members in grouped.items()} or {"": [baseline]}
    return {group or "all": members for group, members in grouped.items()}


def _curves(rows: Sequence[Row], baseline: str | None, where: Callable[[Row], float], label: str) -> bytes:
    members = groups(rows, baseline)

    def panel(axes: Any, group: str) -> None:
        for name, colour in _coloured(members[group], baseline):
            line = [row for row in rows if row["variant"] == name]
            axes.plot(
                [where(row) for row in line],
                [row["simulated_al"] for row in line],
                "o-",
                color=colour,
                label=_short(name, group),
                markersize=3,
            )
        axes.set_xlabel(label)
        axes.set_ylabel("simulated AL, held-out")
        axes.legend(fontsize=7)

    return panels(list(members), panel)


def _acceptance(rows: Sequence[Row], baseline: str | None) -> bytes:
    members = groups(rows, baseline)
    newest = {row["variant"]: row for row in rows}

    def panel(axes: Any, group: str) -> None:
        for name, colour in _coloured(members[group], baseline):
            for key, style in (("acceptance", "o-"), ("visited_acceptance", "x:")):
                shares = newest[name][key]
                label = _short(name, group) if key == "acceptance" else None
                axes.plot(range(len(shares)), shares, style, color=colour, label=label, markersize=3)
        axes.set_ylim(0, 1)
        axes.set_xlabel("depth (dotted: where decoding drafts)")
        axes.set_ylabel("accepted, given that it was reached")
        axes.legend(fontsize=7)

    return panels(list(members), panel)


def _coloured(names: Sequence[str], baseline: str | None) -> list[tuple[str, str]]:
    others = [name for name in names if name != baseline]
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(others)}
    return [(name, colours.get(name, BASELINE_COLOUR)) for name in names]


def _short(name: str, group: str) -> str:
    return name.removeprefix(f"{group}/")
