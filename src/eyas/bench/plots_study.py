"""The figures of a training study, from the rows of its study.jsonl (training/study_records.py).

epochs       simulated AL against epochs of the variant's own data
flops        simulated AL against training FLOPs, the target's forward included
acceptance   acceptance by depth at the end: over all anchors, and over those that decoding visits
overview     simulated AL of every variant at the end, beside what it is held against
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

from eyas.bench.plots import COLOURS, panels, pyplot

Row = dict[str, Any]
GREYS = ("#303030", "#9a9a9a", "#c9b37e")


def draw_study(
    rows: Sequence[Row], common: Sequence[str] = (), against: dict[str, str] | None = None
) -> dict[str, bytes]:
    """Return name -> PNG; empty without rows. A panel for each group, with `common` variants in all.

    Groups in `against` have the variant named there in place of the common ones. "overview" is one small
    picture of all: simulated AL by variant.
    """
    pyplot()
    if not rows:
        return {}
    members = groups(rows, common, against)
    return {
        "epochs": _curves(rows, members, common, lambda row: float(row["epochs"]), "epochs"),
        "flops": _curves(rows, members, common, lambda row: float(row["flops"]), "training FLOPs"),
        "acceptance": _acceptance(rows, members, common),
        "overview": _overview(rows, members, common),
    }


def groups(
    rows: Sequence[Row], common: Sequence[str], against: dict[str, str] | None = None
) -> dict[str, list[str]]:
    """Panel -> its variants. A study without groups is one panel of all.

    base, layers/1, layers/2, k/4, common [base] -> {layers: [base, layers/1, layers/2], k: [base, k/4]}.
    """
    names = list(dict.fromkeys(row["variant"] for row in rows))
    shared = [name for name in common if name in names]
    grouped: dict[str, list[str]] = {}
    for name in names:
        if name not in shared:
            group = name.rpartition("/")[0]
            first = [(against or {})[group]] if group in (against or {}) else shared
            grouped.setdefault(group, [one for one in first if one in names]).append(name)
    return {group or "all": members for group, members in (grouped or {"": shared}).items()}


def _overview(rows: Sequence[Row], members: dict[str, list[str]], common: Sequence[str]) -> bytes:
    """A line for each variant, groups together: its AL as a dot, and its baseline's as a tick."""
    newest = {row["variant"]: row for row in rows}
    lines = [(name, "") for name in common if name in newest]
    lines += [(name, own[0]) for own in members.values() for name in own if name not in common]
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5.2, 0.17 * len(lines) + 0.6), constrained_layout=True)
    for place, (name, base) in enumerate(lines):
        if base in newest and base != name:
            axes.plot(newest[base]["simulated_al"], place, "|", color=GREYS[1], markersize=9)
        colour = GREYS[0] if name in common else COLOURS[0]
        axes.plot(newest[name]["simulated_al"], place, "o", color=colour, markersize=4)
    axes.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("simulated AL, held-out (tick: what it is held against)", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=85, metadata={"Software": None})
    plt.close(figure)
    return _few_colours(buffer)


def _few_colours(picture: io.BytesIO) -> bytes:
    """The picture with a palette of 16: a few KB."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(16).save(small, format="png", optimize=True)
    return small.getvalue()


def _curves(
    rows: Sequence[Row],
    members: dict[str, list[str]],
    common: Sequence[str],
    where: Callable[[Row], float],
    label: str,
) -> bytes:
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


def _acceptance(rows: Sequence[Row], members: dict[str, list[str]], common: Sequence[str]) -> bytes:
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
