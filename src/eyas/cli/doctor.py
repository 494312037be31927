"""`eyas doctor`: what Eyas will run with on this machine; `eyas doctor train`: a recipe before its run."""

import os
from typing import Annotated, Any

import typer

from eyas.cli import console, doctor_train

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("train")(doctor_train.command)


@app.callback(invoke_without_command=True)
def command(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print versions, devices and threads, and say what looks wrong."""
    if context.invoked_subcommand is not None:
        return
    facts = gather()
    if as_json:
        console.print_json(facts)
        return
    for name, value in facts["versions"].items():
        print(f"{name:14}{value or 'not installed'}")
    machine = facts["machine"]
    print(f"{'processor':14}{machine['cpu']}, {machine['num_cpus']} CPUs for this process")
    print(f"{'torch threads':14}{facts['torch_threads']}")
    print(f"{'GPUs':14}{', '.join(machine['gpus']) or 'none'}")
    print(f"{'models':14}{facts['models']}")
    for note in facts["notes"]:
        print(f"note: {note}")


def gather() -> dict[str, Any]:
    """Return the facts that `command` prints."""
    import torch

    from eyas.bench.records import provenance

    facts = {
        key: value for key, value in provenance([]).items() if key in ("versions", "machine", "torch_threads")
    }
    facts["models"] = os.environ.get("EYAS_MODELS") or "~/.cache/eyas/models"
    notes = []
    if torch.version.cuda and not torch.cuda.is_available():
        notes.append("this torch is built for CUDA, but no device answers: check the driver")
    if not torch.version.cuda and os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 -- a device node
        notes.append("there is an NVIDIA device, but this torch is built for the CPU only")
    if facts["torch_threads"] > facts["machine"]["num_cpus"]:
        notes.append("torch has more threads than CPUs: set OMP_NUM_THREADS")
    facts["notes"] = notes
    return facts
