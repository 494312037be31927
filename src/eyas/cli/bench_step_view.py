"""How `eyas bench step` shows its document: a table of phases, then one line for each whole step."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(console: "Console", document: dict[str, Any]) -> None:
    """Print what ran, the ceilings, and both tables."""
    setup, ceilings = document["setup"], document["ceilings"]
    drafter = "no drafter"
    if setup["drafter"]:
        shape = f"tree {setup['tree']}" if setup["tree"] else f"K = {setup['num_draft_tokens']}"
        drafter = f"{', '.join(setup['drafters'])}, {shape}"
    machine = document["provenance"]["machine"]
    place = machine["gpus"][0] if setup["device"].startswith("cuda") else machine["cpu"]
    forced = "" if setup["acceptance"] is None else f", {setup['acceptance']:g} tokens a step forced"
    console.print(
        f"{setup['target']} with {drafter} on {place}, {setup['dtype']}, context {setup['context']}{forced}",
        markup=False,
    )
    console.print(
        f"ceilings: weights read at {ceilings['read_bytes_per_second'] / 1e12:.3g} TB/s, products at "
        f"{ceilings['flops_per_second'] / 1e12:.3g} TFLOP/s; sustained "
        f"{ceilings['sustained']['read_bytes_per_second'] / 1e12:.3g} and "
        f"{ceilings['sustained']['flops_per_second'] / 1e12:.3g}"
    )
    console.print(_phases(document["results"]))
    console.print(_steps(document["results"]))
    for row in document["results"]:
        if row["invariance_cost"]:
            cost = row["invariance_cost"]
            console.print(
                f"invariance, batch {row['batch']}, {_method(row)}: {100 * cost['device']:+.1f}% of the step "
                f"alone, {100 * cost['loop']:+.1f}% in the loop",
                markup=False,
            )


def _phases(results: list[dict[str, Any]]) -> "Table":
    table = _table("batch", "method", "phase", "ms", "floor", "ratio", "launches")
    for row in results:
        for phase in row["phases"]:
            if phase["phase"] == "draft" and row["method"] == "plain":
                continue
            table.add_row(
                str(row["batch"]),
                _method(row),
                phase["phase"],
                _number(phase["ms"], 3),
                _number(phase["floor_ms"] or None, 3),
                _number(phase["ratio"], 2),
                _number(phase["launches"], 0),
            )
    return table


def _steps(results: list[dict[str, Any]]) -> "Table":
    table = _table(
        "batch",
        "method",
        "device",
        "loop",
        "floor",
        "device/fl.",
        "loop/fl.",
        "other",
        "gap",
        "launches",
        "tok/s",
    )
    for row in results:
        step = row["step"]
        table.add_row(
            str(row["batch"]),
            _method(row),
            _number(step["device_ms"], 3),
            _number(step["loop_ms"], 3),
            _number(step["floor_ms"], 3),
            _number(step["device_ratio"], 2),
            _number(step["loop_ratio"], 2),
            f"{100 * step['other_share']:.1f}%",
            f"{100 * step['gap_share']:.1f}%",
            _number(step["launches"], 0),
            _number(step["tokens_per_second"], 0),
        )
    return table


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column in ("method", "phase") else "right", no_wrap=True)
    return table


def _method(row: dict[str, Any]) -> str:
    return str(row["drafter"] or row["method"]) + ("" if row["invariant"] else ", not invariant")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
