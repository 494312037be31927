"""`eyas data vary`: new prompts from old ones."""

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import console
from eyas.cli.data_options import Json


def command(
    prompts: Annotated[Path, typer.Argument(help="JSONL or JSONL.gz with id and prompt, turns or messages.")],
    *,
    out: Annotated[Path, typer.Option(help="File of the new prompts; packed if its name ends in .gz.")],
    how: Annotated[
        str, typer.Option(help="numbers, names, stubs (of tasks with Python asserts); commas between.")
    ] = "numbers,names",
    copies: Annotated[int, typer.Option(min=1, help="Variations of each prompt, at most.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Other seeds give other variations.")] = 0,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of prompts that must not come near (benchmarks). Repeat it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make new prompts from old ones: other numbers, other names, function stubs for tasks with tests.

    `eyas data regenerate` reads them; variation 2 of prompt a is a~v2, held out if a is.
    """
    from eyas.core.errors import ConfigError, DataError
    from eyas.data.files import make_folder, write_bytes
    from eyas.data.sources import read_prompts
    from eyas.data.vary import WAYS, vary

    ways = list(dict.fromkeys(name.strip() for name in how.split(",")))
    if not set(ways) <= set(WAYS):
        raise ConfigError(f"--how {how!r}: choose from {', '.join(WAYS)}, with commas between")
    if out.exists() and out.samefile(prompts):
        raise ConfigError(f"--out {out}: is the file that is varied; name another")
    excluded = [prompt for path in exclude or [] for prompt in read_prompts(path)]
    todo = read_prompts(prompts, limit=limit)
    with console.progress(disable=as_json) as bar:
        task = bar.add_task("vary", total=len(todo))
        records, counts = vary(
            todo, ways, copies, seed, excluded, lambda done: bar.update(task, completed=done)
        )
    faults = ", ".join(f"{number:,} {name}" for name, number in counts["left_out"].items() if number)
    if not records:
        raise DataError(f"{prompts}: --how {how} changed none of {len(todo):,} prompts ({faults})")
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    make_folder(out.parent)
    try:
        write_bytes(out, gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    if as_json:
        console.print_json(counts)
        return
    done = ", ".join(f"{name} in {number:,}" for name, number in counts["changed"].items())
    console.results().print(
        f"{len(records):,} prompts from {len(todo):,}: other {done}\nleft out: {faults or 'none'}\nin {out}"
    )
