"""`eyas compare`: the same prompts, decoded plainly and with every head at every K, side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from eyas.cli import console

app = typer.Typer()


class ManyValues(typer.core.TyperCommand):
    """Lets `--heads A B C` stand for `--heads A --heads B --heads C`, and the same for `--also`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each further word, up to the next option."""
        spread: list[str] = []
        option, position = "", 0
        for word in args:
            option, position = (word, 0) if word.startswith("-") else (option, position + 1)
            if option in ("--heads", "--also") and position > 1:
                spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


@app.command(cls=ManyValues)
def command(
    *,
    target: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
    ],
    heads: Annotated[list[str] | None, typer.Option(help="Head folders, one or more.")] = None,
    also: Annotated[list[str] | None, typer.Option(help="Other drafters: prompt_lookup, small:PATH.")] = None,
    prompts: Annotated[str, typer.Option(help="JSONL file, or 'builtin'.")] = "builtin",
    k: Annotated[str, typer.Option("--num-draft-tokens", "-k", help="One K or several: 3,5,7.")] = "3,5,7",
    tree: Annotated[
        str, typer.Option(help="Heads with trees as well: DEPTHxTOP_KxNODES, several: 3x2x6,5x4x24.")
    ] = "",
    num_prompts: Annotated[int | None, typer.Option(help="Take so many, evenly spaced.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation to answer.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds; leave out rounds that would end later, never the first."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Append the JSON as one line to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Decode the same prompts with and without draft heads, side by side.

    Speedups are medians over rounds of ratios to plain decoding in the same run, methods interleaved.
    """
    from eyas.bench.conversations import num_batches
    from eyas.bench.document import compare_document
    from eyas.bench.offline import CompareOptions, compare, plan_methods
    from eyas.bench.records import append_record, check_record, provenance
    from eyas.bench.workload import read_prompts
    from eyas.cli.compare_view import show
    from eyas.core.tree import TreeBudget
    from eyas.targets.load import load_target

    trees = [TreeBudget.parse(part) for part in tree.split(",") if part.strip()]
    methods = plan_methods(heads or [], also or [], console.whole_numbers(k, "-k"), trees)
    chosen = read_prompts(prompts, num_prompts)
    options = CompareOptions(
        max_tokens=max_tokens,
        batch=batch,
        temperature=temperature,
        rounds=rounds,
        turns=turns,
        time_limit=time_limit,
    )
    if record is not None:
        check_record(record)
    loaded = load_target(target, **console.device_and_dtype(device, dtype))
    total = num_batches(chosen, batch, turns) * len(methods) * rounds
    with console.progress() as bar:
        task = bar.add_task("comparing", total=total)
        comparison = compare(
            loaded,
            methods,
            chosen,
            options,
            advance=lambda name: bar.update(task, advance=1, description=name),
        )
    setup: dict[str, Any] = {
        "target": loaded.identity.name,
        "target_fingerprint": loaded.identity.fingerprint,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prompts": Path(prompts).name,
        "num_prompts": len(chosen),
        "turns": turns,
        "max_tokens": max_tokens,
        "batch": batch,
        "temperature": temperature,
        "rounds": len({sample.round for sample in comparison.samples}),
    }
    document = compare_document(comparison, setup, provenance())
    if record is not None:
        append_record(record, document)
    if as_json:
        console.print_json(document)
    else:
        show(console.results(), comparison, document)
