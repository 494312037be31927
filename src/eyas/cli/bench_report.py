"""`eyas bench report`: records of a sweep as one page, figures and tables."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import console


def report(
    records: Annotated[
        list[Path], typer.Argument(help="Records of `eyas bench sweep`; several are put together.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("report"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as one JSON document.")] = False,
) -> None:
    """Write index.html, which needs nothing else, its figures as PNG files, and tables.json."""
    from eyas.bench.report import write_report
    from eyas.cli.bench_view import show

    page, document = write_report(records, out)
    if as_json:
        console.print_json({"page": str(page), **document})
        return
    show(console.results(), document)
    print(page)
