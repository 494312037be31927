"""`eyas bench step`: one decode step, phase by phase, against its floor."""

from typing import Annotated

import typer

from eyas.cli import console


def step(
    *,
    target: Annotated[
        str,
        typer.Option(
            help="shape:NAME for random weights of a real shape (llama-3.1-8b, smollm2-135m, "
            "qwen2.5-0.5b, llama-3.3-70b, tiny), or a target as everywhere."
        ),
    ],
    drafter: Annotated[
        str, typer.Option(help="shape:eagle3, shape:peagle-4 (4 layers), a head folder, or none.")
    ] = "none",
    k: Annotated[int, typer.Option("--num-draft-tokens", "-k", min=1, help="K of the chain.")] = 7,
    tree: Annotated[str, typer.Option(help="DEPTHxTOP_KxNODES instead of a chain.")] = "",
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8,64",
    context: Annotated[int, typer.Option(min=2, help="Cached tokens of each request.")] = 1024,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Force this mean of tokens a step, bonus included; left out: as it comes."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of one timed run of the engine's loop.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; medians are shown.")] = 5,
    invariant: Annotated[
        bool, typer.Option(help="Kernels whose results do not depend on the batch (CUDA).")
    ] = True,
    pdl: Annotated[
        bool | None, typer.Option(help="Programmatic dependent launch (CUDA); the default unless given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Time one decode step, phase by phase, against what reading the weights takes on this device."""
    from eyas.bench.records import provenance
    from eyas.bench.step import StepOptions, bench_step
    from eyas.bench.step_document import step_document
    from eyas.cli.bench_step_view import show

    options = StepOptions(
        num_draft_tokens=k,
        tree=tree or None,
        batch_sizes=tuple(console.whole_numbers(batch, "--batch")),
        context=context,
        acceptance=acceptance,
        num_steps=steps,
        repeats=repeats,
        invariant=invariant,
        pdl=pdl,
    )
    with console.progress() as bar:
        task = bar.add_task("starting", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        result = bench_step(
            target, drafter, options, **console.device_and_dtype(device, dtype), advance=advance
        )
    document = step_document(result, provenance())
    if as_json:
        console.print_json(document)
    else:
        show(console.results(), document)
