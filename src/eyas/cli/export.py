"""`eyas export HEAD --target T --to ENGINE DIR`: a head in the format that another engine loads."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import console


def command(
    head: Annotated[Path, typer.Argument(help="Head folder (plain, packed or speculators format).")],
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    target: Annotated[str, typer.Option("--target", "-t", help="The target that the head is for.")],
    to: Annotated[str, typer.Option("--to", help="vllm, sglang, speculators or eagle.")] = "vllm",
    dtype: Annotated[str, typer.Option(help="Type of the written weights.")] = "float32",
    k: Annotated[int | None, typer.Option("--k", "-k", help="Draft tokens a step to suggest.")] = None,
    target_name: Annotated[
        str | None, typer.Option(help="Repository id (owner/name) for the speculators format.")
    ] = None,
    without_markov: Annotated[
        bool, typer.Option("--without-markov", help="Leave out a correction that engines cannot run.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a head in the format that vLLM, SGLang, speculators or EAGLE load, and check it."""
    import json

    import torch

    from eyas.export.write import export_head
    from eyas.targets.load import load_target

    written = console.torch_dtype(dtype)
    loaded = load_target(target, dtype=torch.float32, device="cpu", tokenizer=False)
    export = export_head(
        head,
        loaded,
        to,
        out,
        dtype=written,
        num_draft_tokens=k,
        target_name=target_name,
        without_markov=without_markov,
    )
    if json_output:
        document = {
            "engine": export.engine,
            "folder": str(export.folder),
            "num_bytes": export.num_bytes,
            "check": asdict(export.check),
            "serve": export.serve,
            "left_out": export.left_out,
        }
        print(json.dumps(document, indent=2))
        return
    console.notes().print(
        f"{export.check.num_tensors} tensors, {export.num_bytes / 2**20:.1f} MiB, none missing or unknown; "
        f"largest logit difference {export.check.max_logit_difference:.3g}"
    )
    if export.left_out is not None:
        console.notes().print(
            f"left out: {export.left_out}; the engine's acceptance length is the base head's", markup=False
        )
    print(export.folder)
    if export.engine in ("vllm", "speculators"):
        print(f"vllm serve {target} --speculative-config '{json.dumps(export.serve)}'")
    else:
        print(json.dumps(export.serve))
