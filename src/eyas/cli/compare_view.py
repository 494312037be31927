"""How `eyas compare` shows a comparison: a table, the best K of each head, and one answer in colours."""

from typing import TYPE_CHECKING, Any

from eyas.bench.offline import PLAIN, Comparison

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from eyas.bench.analyze import MethodResult
    from eyas.bench.offline import Answer

# The deeper the draft that a token was accepted at, the further along this row.
DEPTH_STYLES = ("green", "cyan", "blue", "magenta", "yellow", "red")


def show(console: "Console", comparison: Comparison, document: dict[str, Any]) -> None:
    """Print texts, table and verdict."""
    from rich.rule import Rule

    console.print(Rule("one prompt, every method"))
    marks = console.color_system is None
    console.print(_legend(marks=marks))
    shown = [PLAIN, *(row.name for row in comparison.best)]
    console.print(comparison.prompt, style="italic", markup=False)
    for name in shown:
        console.print(f"\n{name}", style="bold", markup=False)
        console.print(coloured(comparison.answers[name], marks=marks))
    setup = document["setup"]
    console.print(Rule("figures"))
    console.print(
        f"{setup['target']} on {_place(document)}, {setup['dtype']}, batch {setup['batch']}, "
        f"temperature {setup['temperature']:g}: {setup['num_prompts']} prompts of {setup['prompts']}, "
        f"at most {setup['max_tokens']} tokens, {setup['rounds']} rounds, interleaved",
        markup=False,
    )
    console.print(_table(comparison))
    console.print(_depth_table(comparison.best))
    for row in comparison.best:
        console.print(
            f"{row.name}: {row.speedup:.2f}x plain decoding "
            f"(rounds: {row.speedup_low:.2f} to {row.speedup_high:.2f}), "
            f"acceptance length {row.acceptance_length:.2f}, {_same(row)}",
            markup=False,
        )


def coloured(answer: "Answer", *, marks: bool = False) -> "Text":
    """Return the answer's text: the target's own tokens plain, accepted drafts coloured by depth.

    With `marks`, for output without colours, each run of accepted drafts stands in angle brackets.
    """
    from rich.text import Text

    text = Text()
    before = 0
    for piece, origin in zip(answer.pieces, answer.origins, strict=True):
        if marks and before and origin <= 1:
            text.append("⟩")
        if marks and origin == 1:
            text.append("⟨")
        text.append(piece, style=_style(origin))
        before = origin
    return text.append("⟩" if marks and before else "")


def _style(origin: int) -> str:
    return DEPTH_STYLES[min(origin, len(DEPTH_STYLES)) - 1] if origin else ""


def _legend(*, marks: bool) -> "Text":
    from rich.text import Text

    if marks:
        return Text("tokens in ⟨⟩ were drafted and accepted, the others are the target's own")
    text = Text("tokens: the target's own")
    for depth, style in enumerate(DEPTH_STYLES, start=1):
        last = depth == len(DEPTH_STYLES)
        text.append("  ").append(f"drafted {depth} deep" + (" or more" if last else ""), style=style)
    return text


def _table(comparison: Comparison) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("method", "tok/s", "speedup", "AL", "verify", "draft", "host", "same"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    best = {row.name for row in comparison.best}
    for row in comparison.results:
        table.add_row(
            row.name,
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.acceptance_length:.2f}",
            f"{row.verify_ms:.1f}",
            f"{row.draft_ms:.1f}",
            f"{row.overhead_ms:.1f}",
            "" if row.spec is None else _same(row, short=True),
            style="bold" if row.name in best else "",
        )
    table.caption = (
        "AL: tokens per verification, the target's own included · verify, draft, host: ms per step · "
        "same: answers with exactly plain decoding's tokens"
    )
    return table


def _depth_table(rows: "list[MethodResult]") -> "Table":
    from rich import box
    from rich.table import Table

    depth = max((len(row.acceptance_by_depth) for row in rows), default=0)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("accepted at depth", no_wrap=True)
    for i in range(1, depth + 1):
        table.add_column(str(i), justify="right")
    for row in rows:
        table.add_row(row.name, *(f"{share:.2f}" for share in row.acceptance_by_depth))
        given = (f"{share:.2f}" for share in row.conditional_acceptance_by_depth)
        table.add_row("  where the one before was", *given, style="dim")
    return table


def _same(row: "MethodResult", *, short: bool = False) -> str:
    if row.identical:
        return "yes" if short else "the same tokens as plain decoding"
    count = f"{row.num_identical} of {row.num_answers}"
    return count if short else f"the same tokens in {count} answers"


def _place(document: dict[str, Any]) -> str:
    facts = document["provenance"]
    if document["setup"]["device"].startswith("cuda") and facts["machine"]["gpus"]:
        return str(facts["machine"]["gpus"][0])
    return f"{facts['machine']['cpu']}, torch threads: {facts['torch_threads']}"
