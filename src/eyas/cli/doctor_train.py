"""`eyas doctor train RECIPE`: look at a run before it begins."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli import console

SIGNS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def command(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, as for `eyas train`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as in optim.lr=5e-4")] = None,
    *,
    preset: Annotated[str | None, typer.Option(help="As for `eyas train`.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    documents: Annotated[int, typer.Option(min=0, help="Documents to print with their loss mask.")] = 1,
    steps: Annotated[int, typer.Option(min=0, help="Steps to time for the prediction; 0 leaves it out.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Examine a recipe: loss masks, captured states, teacher, vocabulary, memory and time.

    Ends with status 1 where a check fails. Nothing is written.
    """
    from eyas.cli.train import open_trainer
    from eyas.config import load_config
    from eyas.training.config import TrainConfig
    from eyas.training.doctor import examine
    from eyas.training.predict import predict

    config = load_config(TrainConfig, recipe, [*(overrides or []), *([f"preset={preset}"] if preset else [])])
    place = console.device_and_dtype(device, None)["device"]
    run = replace(config.run, compile=False)
    if place == "cpu":
        run = replace(run, batch_rows=1, accumulation=1)  # predict() scales up
    trainer = open_trainer(replace(config, run=run), device=device)
    findings = examine(trainer)
    failed = any(finding.status == "fail" for finding in findings)
    prediction = predict(trainer, config.run, steps=steps) if steps and not failed else None
    trainer.loader.close()
    if as_json:
        facts = {"findings": findings, "failed": failed, "prediction": None}
        if prediction is not None:
            facts["prediction"] = {**asdict(prediction), "hours": prediction.hours}
        console.print_json(facts)
    else:
        _print_documents(trainer, documents)
        _print_findings(findings, prediction, config)
    if failed:
        raise typer.Exit(1)


def _print_documents(trainer: Any, count: int) -> None:
    """Documents with their supervised tokens in green; ids where there is no tokenizer."""
    from rich.text import Text

    from eyas.cli.data import pieces

    tokenizer = trainer.target.tokenizer
    for number in range(min(count, trainer.store.num_documents)):
        ids, spans = trainer.store.document(number)
        text = Text(f"document {number}: {len(ids)} tokens, supervised in green\n", style="bold")
        for piece in pieces(tokenizer or _Ids(), ids, spans):
            text.append(piece["text"], style="green" if piece["supervised"] else "dim")
        console.results().print(text)


class _Ids:
    """Shows ids where there is no tokenizer."""

    @staticmethod
    def decode(ids: list[int], **_options: Any) -> str:
        """The ids themselves."""
        return "".join(f"{token} " for token in ids)


def _print_findings(findings: Any, prediction: Any, config: Any) -> None:
    from rich.text import Text

    printer = console.results()
    for finding in findings:
        sign, style = SIGNS[finding.status]
        printer.print(Text.assemble((sign, style), f"  {finding.name}: {finding.text}"))
    if prediction is None:
        return
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in prediction.memory.items())
    printer.print(f"memory  {prediction.total_bytes / 1e9:.2f} GB ({parts})")
    length = f"{prediction.seconds_per_step:.2f} s a step"
    if prediction.hours is not None:
        length += f", {prediction.steps:,} steps, {prediction.hours:.2f} hours"
    if config.run.max_minutes is not None:
        length += f", at most {config.run.max_minutes:g} minutes"
    compiled = "; run.compile makes it faster than that" if config.run.compile else ""
    printer.print(f"time    {length}{compiled}")
