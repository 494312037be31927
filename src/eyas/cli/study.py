"""`eyas study`: train variants of a recipe with equal steps, and compare them in a table and figures."""

from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli import console


def command(
    file: Annotated[Path, typer.Argument(help="YAML study, as in recipes/studies/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value for all variants, as in data.store=answers/store")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the study.")],
    only: Annotated[
        str, typer.Option(help="Variants or groups to run, as in layers,k/12; all if empty.")
    ] = "",
    part: Annotated[
        str, typer.Option(help="2/8: of those every eighth from the second on, for a process a GPU.")
    ] = "1/1",
    together: Annotated[
        int, typer.Option(min=1, help="Variants in turn, step by step: they ask the target once for all.")
    ] = 1,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each variant.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop cleanly after so long; the same command goes on.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; cuda where there is one.")] = None,
    keep_heads: Annotated[bool, typer.Option(help="Keep the trained weights of every variant.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Show the variants, train nothing.")] = False,
    report_only: Annotated[
        bool, typer.Option("--report", help="Make table and figures of what is there, train nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each variant's newest record as one JSON document.")
    ] = False,
) -> None:
    """Train variants of a recipe with equal steps, and compare them.

    What is finished is skipped, what was stopped or killed goes on from its newest checkpoint. Writes
    study.jsonl (a line for each validation), table.md and figures (PNG, with matplotlib) to --out.
    """
    import time

    from eyas.training.study import choose, load_study
    from eyas.training.study_records import last_rows
    from eyas.training.study_run import describe, run_study

    started = time.monotonic()
    study = load_study(file, out, overrides=tuple(overrides or ()), steps=steps)
    plans = choose(study, [name for name in only.split(",") if name], _part(part))
    if list_only:
        if as_json:
            console.print_json({**describe(study), "variants": [plan.name for plan in plans]})
        for plan in () if as_json else plans:
            print(plan.name, *study.config.section(plan.name).overrides)
        return
    notes = console.notes()
    if not report_only:
        run_study(
            study,
            plans,
            out,
            _Opener(device),
            deadline=None if minutes is None else started + 60 * minutes,
            keep_heads=keep_heads,
            together=together,
            say=lambda line: notes.print(line, markup=False),
        )
    rows, text = _report(out, notes)
    if as_json:
        console.print_json({**describe(study), "rows": last_rows(rows)})
    else:
        print(text, end="")


def _report(out: Path, notes: Any) -> tuple[Any, str]:
    """Write study.jsonl, table.md and figures; (rows, table)."""
    from eyas.bench.plots_study import draw_study
    from eyas.core.errors import ConfigError
    from eyas.data.files import write_bytes
    from eyas.training.study_records import collect, read_json, table

    rows, about = collect(out), read_json(out / "study.json")
    text = table(rows, about["baseline"], about.get("against"))
    write_bytes(out / "table.md", text.encode())
    try:
        common = [name for name in (about["baseline"], *about["beside"]) if name]
        for name, png in draw_study(rows, common, about.get("against")).items():
            write_bytes(out / f"{name}.png", png)
    except ConfigError as error:
        notes.print(f"no figures: {error}", markup=False)
    return rows, text


class _Opener:
    """Opens trainers on one device; targets and stores stay loaded from one to the next."""

    def __init__(self, device: str | None) -> None:
        self.device, self.loaded = device, {}  # type: ignore[var-annotated]
        if device is not None and device.startswith("cuda:"):
            import torch

            console.device_and_dtype(device, None)
            torch.cuda.set_device(device)

    def __call__(self, config: Any, display: Any) -> Any:
        from eyas.cli.train import open_trainer

        return open_trainer(config, device=self.device, display=display, loaded=self.loaded)


def _part(text: str) -> tuple[int, int]:
    """Read "2/8" as (2, 8)."""
    from eyas.core.errors import ConfigError

    first, slash, count = text.partition("/")
    if slash and first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count):
        return int(first), int(count)
    raise ConfigError(f"--part: expected I/N with I from 1 to N, as in 2/8; got {text!r}")
