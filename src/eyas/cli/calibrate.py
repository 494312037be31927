"""`eyas calibrate`: find the draft shape that is fastest at each batch size, and keep it with the head."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli import console

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.bench.calibrate import Calibration


def command(
    *,
    target: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
    ],
    head: Annotated[Path, typer.Option(help="Head folder; its eyas.json receives the result.")],
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,2,4,8,16,32,64",
    k: Annotated[
        str, typer.Option("--num-draft-tokens", "-k", help="K of the chains that are timed.")
    ] = "1,2,3,4,5,7,9,11,15",
    tree: Annotated[
        str, typer.Option(help="Trees, DEPTHxTOP_KxNODES with commas between; empty for none.")
    ] = "3x2x6,5x2x10,5x4x16,5x4x24,7x4x32,7x6x48",
    prompts: Annotated[str, typer.Option(help="JSONL file, or 'builtin'.")] = "builtin",
    num_prompts: Annotated[int | None, typer.Option(help="Take so many, evenly spaced.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    context: Annotated[int, typer.Option(min=2, help="Cached tokens of each request while timing.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each shape; medians count.")] = 5,
    write: Annotated[bool, typer.Option(help="Write the result into the head's eyas.json.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the number of drafts and the tree shape that are fastest on this device at each batch size."""
    from eyas.bench.calibrate import CalibrateOptions, calibrate, write_calibration
    from eyas.bench.conversations import encode_chat
    from eyas.bench.step_models import open_drafter, open_target
    from eyas.bench.workload import read_prompts
    from eyas.core.errors import ConfigError

    if not (head / "config.json").is_file():
        raise ConfigError(f"--head: {head} is not a head folder (it has no config.json)")
    options = CalibrateOptions(
        batch_sizes=tuple(console.whole_numbers(batch, "--batch")),
        ks=tuple(console.whole_numbers(k, "-k")),
        trees=tuple(part.strip() for part in tree.split(",") if part.strip()),
        context=context,
        repeats=repeats,
        max_tokens=max_tokens,
    )
    chosen = read_prompts(prompts, num_prompts)
    if write and not os.access(head, os.W_OK):
        raise ConfigError(f"--head: {head} cannot be written to; with --no-write the result is printed alone")
    loaded = open_target(target, **console.device_and_dtype(device, dtype), tokenizer=True)
    if loaded.tokenizer is None:
        raise ConfigError(f"--target: {target} has no tokenizer, so no prompt can be read")
    ids = [encode_chat(loaded.tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in chosen]
    with console.progress() as bar:
        task = bar.add_task("starting", total=None)
        found = calibrate(
            loaded,
            open_drafter(str(head), loaded),
            ids,
            options,
            advance=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )
    if write:
        write_calibration(head, found)
    if as_json:
        console.print_json(found.as_dict())
        return
    out = console.results()
    shares = " ".join(f"{share:.2f}" for share in found.acceptance_by_depth)
    out.print(f"{head.name} on {found.device}, {found.dtype}: accepted by depth {shares}", markup=False)
    out.print(_table(found))
    if write:
        out.print(f"written to {head / 'eyas.json'}", markup=False)


def _table(found: "Calibration") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("batch", "best", "tok/s", "over plain", "best chain", "tok/s", "best tree", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for choice in found.choices:
        rates = found.rates[choice.max_batch]
        plain = found.plain[choice.max_batch]
        cells = [str(choice.max_batch), choice.tree or f"K = {choice.k}", _rate(choice.tokens_per_second)]
        cells.append(f"{choice.tokens_per_second / plain:.2f}x")
        for is_tree in (False, True):
            kind = {shape: rate for shape, rate in rates.items() if (shape.tree is not None) == is_tree}
            best = max(kind, key=lambda shape: kind[shape], default=None)
            cells += ["", ""] if best is None else [best.tree or f"K = {best.k}", _rate(kind[best])]
        table.add_row(*cells)
    return table


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{1 if tokens_per_second < 100 else 0}f}"
