"""`eyas bench step`: one decode step, phase by phase, against its floor."""

from pathlib import Path
from typing import Annotated, Any, Literal

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
        list[str],
        typer.Option(
            default_factory=lambda: ["none"],
            help="shape:eagle3, shape:peagle-4 (4 layers), shape:peagle-4-hidden-128 (with a correction), a "
            "head folder, or none; may come several times.",
        ),
    ],
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
    both: Annotated[
        bool, typer.Option("--both", help="Time every method with and without them, in turn: what they cost.")
    ] = False,
    pdl: Annotated[
        Literal["off", "late", "early", "auto"] | None,
        typer.Option(
            help="Programmatic dependent launch (Hopper on): when the next kernel may start; default late."
        ),
    ] = None,
    warm: Annotated[
        int, typer.Option(min=0, help="Compile kernels in this many processes first (CUDA); 0: as they come.")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Append a line of JSON to this file after each batch size.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Time one decode step, phase by phase, against what reading the weights takes on this device."""
    from eyas.bench.records import append_record, check_record, provenance
    from eyas.bench.step import StepResult, bench_step
    from eyas.bench.step_document import step_document
    from eyas.bench.step_method import StepOptions
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
        both=both,
        pdl=pdl,
        warm=warm,
    )
    if record is not None:
        check_record(record)

    def done(part: StepResult) -> None:
        if record is not None:
            append_record(record, step_document(part, provenance()))

    with console.progress() as bar:
        task = bar.add_task("starting", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        where: dict[str, Any] = console.device_and_dtype(device, dtype)
        result = bench_step(target, drafter, options, **where, advance=advance, done=done)
    document = step_document(result, provenance())
    if as_json:
        console.print_json(document)
    else:
        show(console.results(), document)
