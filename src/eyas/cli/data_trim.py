"""`eyas data trim`: cut the loops that answers end in."""

from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli import console


def command(
    store: Annotated[Path, typer.Argument(help="A token store.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the trimmed store; a run that stopped begins anew.")],
    ngram: Annotated[int, typer.Option(min=1, help="Tokens that must come again to count as repeated.")] = 6,
    window: Annotated[int, typer.Option(min=1, help="Tokens over which the share is taken.")] = 64,
    share: Annotated[float, typer.Option(help="Of a window's tokens, how many repeat in a loop.")] = 0.85,
    keep: Annotated[int, typer.Option(min=0, help="Tokens of a loop that stay.")] = 48,
    show: Annotated[int, typer.Option(min=0, help="Print so many of the loops; needs --target.")] = 0,
    target: Annotated[
        str | None, typer.Option(help="Whose tokenizer shows them: folder, GGUF file or name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Cut answers where they begin to repeat themselves until their end; others stay as they are.

    A loop's first tokens stay, so that a head still learns to follow one.
    """
    from eyas.core.errors import ConfigError
    from eyas.data.loops import LoopRule
    from eyas.data.loops_store import trim_store
    from eyas.data.store import TokenStore

    rule = LoopRule(ngram=ngram, window=window, share=share, keep=keep)
    if show and target is None:
        raise ConfigError("--show needs --target, whose tokenizer makes text of the tokens")
    data = TokenStore.load(store)
    tokenizer = _tokenizer(target, data, store) if target is not None else None
    with console.progress(disable=as_json) as bar:
        task = bar.add_task("trim", total=data.num_documents)
        manifest, loops = trim_store(
            data, out, rule, source=store, progress=lambda done: bar.update(task, completed=done)
        )
    before = {key: data.manifest[key] for key in ("num_documents", "num_tokens", "num_supervised")}
    after = {key: manifest[key] for key in before}
    examples: list[dict[str, Any]] = []
    # Spread over the store, which is often sorted by source.
    for number in range(min(show, len(loops))):
        document, begin, cut = loops[number * len(loops) // min(show, len(loops))]
        ids, spans = data.document(document)
        first, end = next(span for span in spans if span[0] <= begin < span[1])
        parts = {"before": ids[first:begin], "kept": ids[begin:cut], "cut": ids[cut:end]}
        assert tokenizer is not None
        texts = {name: tokenizer.decode(part, skip_special_tokens=False) for name, part in parts.items()}
        examples.append({"document": document, "loop": begin, **texts})
    result = {
        "before": before,
        "after": after,
        "share_cut": 1 - after["num_supervised"] / before["num_supervised"],
        **manifest["meta"]["trim"],
        "examples": examples,
        "hash": manifest["hash"],
    }
    if as_json:
        console.print_json(result)
    else:
        _print(result, out)


def _tokenizer(target: str, data: Any, store: Path) -> Any:
    """The target's tokenizer; DataError where the store was made with another vocabulary."""
    from eyas.core.errors import DataError
    from eyas.targets.load import load_target

    loaded = load_target(target, pack=False)
    if data.manifest["vocab_size"] != loaded.config.vocab_size:
        raise DataError(
            f"{store}: made for a vocabulary of {data.manifest['vocab_size']}, "
            f"the target has {loaded.config.vocab_size}"
        )
    return loaded.tokenizer


def _print(result: dict[str, Any], out: Path) -> None:
    from rich.text import Text

    printer, counts = console.results(), result["counts"]
    for example in result["examples"]:
        printer.print(f"document {example['document']}, loop from token {example['loop']}", style="dim")
        text = Text(example["before"])
        # Words too, for output without colours.
        text.append("[loop]", style="dim").append(example["kept"], style="bold green")
        text.append("[cut]", style="dim").append(example["cut"], style="red strike")
        printer.print(text)
    before, after = result["before"], result["after"]
    printer.print(
        f"{counts['num_looping']:,} of {counts['num_answers']:,} answers loop "
        f"({counts['num_looping_tokens']:,} tokens), {counts['num_cut']:,} were cut"
    )
    for name, words in (
        ("num_documents", "documents"),
        ("num_tokens", "tokens"),
        ("num_supervised", "supervised"),
    ):
        change = 100 * (after[name] / before[name] - 1)
        printer.print(f"  {words:<10} {before[name]:>14,} -> {after[name]:>14,}  {change:+.1f} %")
    printer.print(f"in {out}, hash {result['hash'][:12]}")
