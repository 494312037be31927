"""The figures of a training study, from the rows of its study.jsonl (training/study_records.py).

epochs       simulated AL against epochs of the variant's own data
flops        simulated AL against training FLOPs, the target's forward included
acceptance   acceptance by depth at the end: over all anchors, and over those that decoding visits
"""

from collections.abc import Callable, Sequence
from typing import Any

from eyas.bench.plots import COLOURS, panels, pyplot

Row = dict[str, Any]
GREYS = ("#303030", "#9a9a9a", "#c9b37e")


def draw_study(rows: Sequence[Row], common: Sequence[str] = ()) -> dict[str, bytes]:
    """Return name -> PNG; empty without rows. A panel for each group, with `common` variants in all."""
    pyplot()
    if not rows:
        return {}
    return {
        "epochs": _curves(rows, common, lambda row: float(row["epochs"]), "epochs"),
        "flops": _curves(rows, common, lambda row: float(row["flops"]), "training FLOPs"),
        "acceptance": _acceptance(rows, common),
    }


def groups(rows: Sequence[Row], common: Sequence[str]) -> dict[str, list[str]]:
    """Panel -> its variants. A study without groups is one panel of all.

    base, layers/1, layers/2, k/4, common [base] -> {layers: [base, layers/1, layers/2], k: [base, k/4]}.
    """
    names = list(dict.fromkeys(row["variant"] for row in rows))
    shared = [name for name in common if name in names]
    grouped: dict[str, list[str]] = {}
    for name in names:
        if name not in shared:
            grouped.setdefault(name.rpartition("/")[0], list(shared)).append(name)
    return {group or "all": members for group, members in (grouped or {"": shared}).items()}


def _curves(rows: Sequence[Row], common: Sequence[str], where: Callable[[Row], float], label: str) -> bytes:
    members = groups(rows, common)

    def panel(axes: Any, group: str) -> None:
        for name, colour in _coloured(members[group], common):
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


def _acceptance(rows: Sequence[Row], common: Sequence[str]) -> bytes:
    members = groups(rows, common)
    newest = {row["variant"]: row for row in rows}

    def panel(axes: Any, group: str) -> None:
        for name, colour in _coloured(members[group], common):
            for key, style in (("acceptance", "o-"), ("visited_acceptance", "x:")):
                shares = newest[name][key]
                label = _short(name, group) if key == "acceptance" else None
                axes.plot(range(len(shares)), shares, style, color=colour, label=label, markersize=3)
        axes.set_ylim(0, 1)
        axes.set_xlabel("depth (dotted: where decoding drafts)")
        axes.set_ylabel("accepted, given that it was reached")
        axes.legend(fontsize=7)

    return panels(list(members), panel)


def _coloured(names: Sequence[str], common: Sequence[str]) -> list[tuple[str, str]]:
    """Greys for what stands in every panel."""
    others = [name for name in names if name not in common]
    colours = {name: GREYS[number % len(GREYS)] for number, name in enumerate(common)}
    colours |= {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(others)}
    return [(name, colours[name]) for name in names]


def _short(name: str, group: str) -> str:
    return name.removeprefix(f"{group}/")
