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

    with console.byte_progress() as bar:
        task = bar.add_task(name, total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total or None)

        found = get_model(name, path=path, progress=report)
    if as_json:
        console.print_json({"name": name, "path": str(found)})
    else:
        print(found)


@app.command()
def export(
    target: Annotated[str, typer.Argument(help="GGUF file, or a name from `eyas models list`.")],
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    *,
    dtype: Annotated[str, typer.Option(help="Type of the written weights.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a GGUF model as a Hugging Face folder, which vLLM and SGLang read."""
    from eyas.targets.folder import export_folder

    folder = export_folder(target, out, console.torch_dtype(dtype))
    if as_json:
        console.print_json({"target": target, "folder": str(folder), "dtype": dtype})
    else:
        print(folder)


@app.command("list")
def list_models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the models that `eyas models get` knows, and which are there."""
    from eyas.targets.fetch import MODELS, models_root

    rows = [
        {
            "name": name,
            "license": model.license,
            "num_bytes": model.num_bytes,
            "path": str(models_root() / model.file) if (models_root() / model.file).is_file() else None,
        }
        for name, model in MODELS.items()
    ]
    if as_json:
        console.print_json(rows)
        return
    for row in rows:
        print(
            f"{row['name']:22}{MODELS[str(row['name'])].num_bytes / 1e6:6.0f} MB  {row['license']:12}", end=""
        )
        print(row["path"] or "not here yet")
