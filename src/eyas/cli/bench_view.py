"""The tables of `eyas bench sweep` and `eyas bench report` on a terminal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show(console: "Console", document: dict[str, Any]) -> None:
    """Print throughput by place, then why one method leads."""
    from rich.table import Table

    from eyas.bench.report import k_of

    rows = document["rows"]
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        table = Table(
            title=f"{dataset}: output tokens a second", title_justify="left", box=None, pad_edge=True
        )
        for name in (
            "load",
            "method",
            "K",
            "tok/s",
            "95 %",
            "x plain",
            "AL",
            "step ms",
            "ttft p50",
            "itl p50",
        ):
            table.add_column(name, justify="left" if name in ("load", "method", "95 %") else "right")
        for row in (row for row in rows if row["dataset"] == dataset):
            speed, plain = row["tokens_per_second"], row["over_plain"]
            low, high = speed["low"], speed["high"]
            table.add_row(
                f"c={row['concurrency']}" if row["rate"] is None else f"{row['rate']:g}/s",
                row["method"] if row["engine"] == "local" else f"{row['method']} @ {row['engine']}",
                k_of(row["num_draft_tokens"]) + ("*" if row["best_k"] and row["num_draft_tokens"] else ""),
                f"{speed['value']:.1f}",
                "" if low is None else f"{low:.0f} to {high:.0f}",
                "" if plain is None else f"{plain['value']:.2f}",
                _number(row["acceptance_length"]),
                _number(row["step_ms"]),
                _number(row["ttft_p50"]),
                _number(row["itl_p50"]),
            )
        console.print(table)
    for one in document["leaders"]:
        load = f"c={one['concurrency']}" if one["rate"] is None else f"{one['rate']:g}/s"
        console.print(f"{one['dataset']} {load}: {one['reason']}", markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
