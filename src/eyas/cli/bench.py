"""`eyas bench`: measurements of speed, a command each.

A command lives in a file of its own (`bench_<name>.py`) and is added below.
"""

import typer

from eyas.cli.bench_report import report
from eyas.cli.bench_step import step
from eyas.cli.bench_sweep import sweep

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.command("step")(step)
app.command("sweep")(sweep)
app.command("report")(report)


@app.callback()
def group() -> None:
    """Measure speed: a decode step against what the hardware allows, methods under load, and a report."""
