"""`eyas import FOLDER OUT --target T`: a head that another tool wrote, as a head folder of ours."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli import console


def command(
    folder: Annotated[
        Path, typer.Argument(help="A head: vLLM's, SGLang's, speculators' or EAGLE's format, or ours.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    *,
    target: Annotated[str, typer.Option("--target", "-t", help="The target that the head is for.")],
    packed: Annotated[
        bool, typer.Option(help="Keep weights as int8, a scale a row; smaller, not equal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Read a head in any known format, check it against the target, and write it as a head folder.

    Without --packed the new folder gives the same logits as the head that was read, which is checked.
    """
    from eyas.export.write import import_head
    from eyas.targets.load import load_target

    loaded = load_target(target, device="cpu", tokenizer=False, pack=False)
    done = import_head(folder, loaded, out, packed=packed)
    if as_json:
        console.print_json(
            {
                "folder": str(done.folder),
                "kind": done.kind,
                "max_logit_difference": done.max_logit_difference,
            }
        )
        return
    console.notes().print(f"{done.kind} head, largest logit difference {done.max_logit_difference:.3g}")
    print(done.folder)
