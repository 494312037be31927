"""`eyas verify`: show on one's own target and drafter that drafting changes no token."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from eyas.cli import console

if TYPE_CHECKING:
    from eyas.engine.verify_check import LosslessReport

T = TypeVar("T", int, float)


def command(
    *,
    target: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
    ],
    drafter: Annotated[str, typer.Option(help="Head folder, prompt_lookup, or small:PATH.")],
    k: Annotated[str, typer.Option("--num-draft-tokens", "-k", help="One K or several: 1,3,7,15.")] = "3,7",
    tree: Annotated[
        str, typer.Option(help="Trees to check as well: DEPTHxTOP_KxNODES, several: 3x2x6,5x4x24.")
    ] = "",
    batches: Annotated[str, typer.Option(help="Batch sizes of the equality checks.")] = "1,4",
    temperatures: Annotated[str, typer.Option(help="Besides 0, which is always checked.")] = "1.0",
    prompts: Annotated[str, typer.Option(help="JSONL file, or 'builtin'.")] = "builtin",
    num_prompts: Annotated[int, typer.Option(min=1, help="Take so many, evenly spaced.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens compared for each prompt.")] = 32,
    samples: Annotated[
        int, typer.Option(min=0, help="Seeds of each distribution check; 0 leaves them out.")
    ] = 300,
    sample_drafts: Annotated[
        bool, typer.Option("--sample-drafts", help="Draw drafts and verify by the rejection rule.")
    ] = False,
    alpha: Annotated[
        float, typer.Option(help="Chance that a distribution check fails though all is well.")
    ] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of the first request.")] = 0,
    engines: Annotated[
        int,
        typer.Option(min=1, help="Engines side by side for batches below 16: sooner done on a GPU."),
    ] = 1,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Hold plain decoding at every batch size against the largest, too."),
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show on your own target and head that drafting changes no token.

    Token equality with plain decoding at temperature 0 and, seed by seed, above it; a chi-square test of the
    sampled distribution against the target's own. Ends with status 1 if anything differs by more than 16-bit
    rounding explains; for each greedy answer that parts, the gap of the target's logits there is reported.
    """
    from eyas.bench.conversations import encode_chat
    from eyas.bench.workload import read_prompts
    from eyas.core.tree import TreeBudget
    from eyas.engine.verify_check import CheckOptions, check_lossless, num_checks
    from eyas.targets.load import load_target

    options = CheckOptions(
        num_draft_tokens=tuple(_numbers("--num-draft-tokens", k, int)),
        trees=tuple(TreeBudget.parse(part) for part in tree.split(",") if part.strip()),
        batch_sizes=tuple(_numbers("--batches", batches, int)),
        temperatures=tuple(_numbers("--temperatures", temperatures, float)),
        num_tokens=max_tokens,
        samples=samples,
        sample_drafts=sample_drafts,
        alpha=alpha,
        seed=seed,
        engines=engines,
        plain_batches=plain,
    )
    chosen = read_prompts(prompts, num_prompts)
    loaded = load_target(target, **console.device_and_dtype(device, dtype))
    ids = [encode_chat(loaded.tokenizer, [{"role": "user", "content": one.turns[0]}]) for one in chosen]
    with console.progress() as bar:
        task = bar.add_task("verifying", total=num_checks(options))
        report = check_lossless(loaded, drafter, ids, options, progress=lambda _: bar.update(task, advance=1))
    if as_json:
        console.print_json({**_plain(report), "passed": report.passed})
    else:
        _show(report)
    if not report.passed:
        raise typer.Exit(1)


def _numbers(flag: str, text: str, kind: Callable[[str], T]) -> list[T]:
    from eyas.core.errors import ConfigError

    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"{flag}: expected numbers with commas between, got {text!r}") from error


def _plain(report: "LosslessReport") -> dict[str, object]:
    from dataclasses import asdict

    return asdict(report)


def _show(report: "LosslessReport") -> None:
    from rich.table import Table

    table = Table(title=f"{report.target} with {report.drafter}, {report.dtype} on {report.device}")
    for name, justify in (("check", "left"), ("T", "right"), ("K", "right"), ("AL", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("result")
    table.add_column("verdict")
    for check in report.checks:
        verdict = "[green]lossless[/green]" if check.passed else "[bold red]DIFFERS[/bold red]"
        if check.passed and check.near_ties:
            verdict = "[yellow]within rounding[/yellow]"
        table.add_row(
            check.kind,
            f"{check.temperature:g}",
            check.tree or str(check.num_draft_tokens),
            f"{check.acceptance_length:.2f}",
            check.detail.replace("[", r"\["),
            verdict,
        )
    console.results().print(table)
    num_failed = sum(not check.passed for check in report.checks)
    if report.passed:
        ties = sum(check.near_ties for check in report.checks)
        noted = f" {ties} answers part at ties within rounding." if ties else ""
        console.results().print(f"[green]Lossless[/green]: all {len(report.checks)} checks passed.{noted}")
    else:
        console.results().print(
            f"[bold red]Not lossless[/bold red]: {num_failed} of {len(report.checks)} checks failed."
        )
    console.results().print(
        f"A correct engine fails a distribution check once in {1 / report.alpha:,.0f} times."
    )
