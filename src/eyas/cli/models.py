"""`eyas models`: get small real models to try things on."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import console

app = typer.Typer(no_args_is_help=True, help="Get small real models to try things on.")


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A name from `eyas models list`.")],
    *,
    path: Annotated[
        Path | None, typer.Option(help="A file or folder that you already have; it is checked and used.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Make sure that a model is there, and print where; one that is already there is not fetched again."""
    from eyas.targets.fetch import get_model

    err = console.notes()
    found = get_model(name, path=path, progress=err.print)
    if as_json:
        console.print_json({"name": name, "path": str(found)})
    else:
        print(found)


@app.command("list")
def list_models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the models that `eyas models get` knows, and which are there."""
    from eyas.targets.fetch import MODELS, model_path

    rows = [(name, entry, model_path(name)) for name, entry in MODELS.items()]
    if as_json:
        console.print_json(
            [{"name": n, "file": e.file_name, "path": str(p) if p else None} for n, e, p in rows]
        )
        return
    for name, entry, path in rows:
        print(f"{name:24}{path or 'not here yet: ' + entry.file_name}")
