"""`eyas data`: prompts, vary, regenerate, pack, show, count, trim, capture."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import console, data_capture, data_prompts, data_regenerate, data_trim, data_vary
from eyas.cli.data_options import (
    Json,
    TargetOption,
    TemplateOption,
    chat_template,
    parse_template_options,
    tell,
)

if TYPE_CHECKING:
    from rich.text import Text

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.command("prompts")(data_prompts.command)
app.command("vary")(data_vary.command)
app.command("regenerate")(data_regenerate.command)
app.command("trim")(data_trim.command)
app.command("capture")(data_capture.command)


@app.command()
def pack(
    conversations: Annotated[
        list[Path], typer.Argument(help="JSONL files of conversations, or folders of shards.")
    ],
    *,
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="Folder of the token store.")],
    last_turn_only: Annotated[bool, typer.Option(help="Supervise only the last answer of each.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=8, help="Cut documents here.")] = None,
    template_option: TemplateOption = None,
    as_json: Json = False,
) -> None:
    """Tokenise conversations into a token store; exact ids are kept where the records have them."""
    from eyas.data.build import build_store
    from eyas.targets.load import load_target

    loaded = load_target(target, pack=False)
    options = parse_template_options(template_option)
    manifest = build_store(
        conversations,
        out,
        vocab_size=loaded.config.vocab_size,
        template=chat_template(loaded, options),
        meta={
            "target": loaded.identity.name,
            "fingerprint": loaded.identity.fingerprint,
            "template": options,
        },
        last_turn_only=last_turn_only,
        max_tokens=max_tokens,
    )
    tell({"answers": None, "store": manifest}, as_json, out)


@app.command()
def show(
    store: Annotated[Path, typer.Argument(help="A token store.")],
    *,
    target: TargetOption,
    index: Annotated[int, typer.Option(min=0, help="Which document.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many documents.")] = 1,
    as_json: Json = False,
) -> None:
    """Print documents with the supervised tokens coloured (green) and the context dim.

    Where there are no colours, supervised stretches stand in angle brackets.
    """
    from eyas.core.errors import DataError
    from eyas.data.store import TokenStore
    from eyas.targets.load import load_target

    data = TokenStore.load(store)
    if index >= data.num_documents:
        raise DataError(f"{store}: has {data.num_documents} documents, there is no document {index}")
    loaded = load_target(target, pack=False)
    if data.manifest["vocab_size"] != loaded.config.vocab_size:
        raise DataError(
            f"{store}: made for a vocabulary of {data.manifest['vocab_size']}, "
            f"the target has {loaded.config.vocab_size}"
        )
    tokenizer = loaded.tokenizer
    documents: list[dict[str, Any]] = []
    for number in range(index, min(index + count, data.num_documents)):
        ids, spans = data.document(number)
        documents.append(
            {"index": number, "ids": ids, "spans": spans, "pieces": pieces(tokenizer, ids, spans)}
        )
    if as_json:
        console.print_json(documents)
        return
    out = console.results()
    for document in documents:
        supervised = sum(end - begin for begin, end in document["spans"])
        console.notes().print(
            f"document {document['index']}: {len(document['ids'])} tokens, {supervised} supervised",
            style="dim",
        )
        out.print(coloured(document["pieces"], marks=out.color_system is None))


@app.command()
def count(
    store: Annotated[Path, typer.Argument(help="A token store.")],
    *,
    sizes: Annotated[
        str, typer.Option(help="Draft vocabulary sizes to try.")
    ] = "4096,8192,15872,16384,32000",
    as_json: Json = False,
) -> None:
    """Show how many supervised tokens a draft vocabulary of each size would cover."""
    import numpy as np

    from eyas.data.store import TokenStore
    from eyas.data.vocab_count import count_tokens, draft_vocabulary

    data = TokenStore.load(store)
    counts = count_tokens(data)
    vocab_size = counts.all.size
    wanted = _sizes(sizes, vocab_size)
    table = [{"draft_vocab_size": size, "coverage": draft_vocabulary(counts, size)[1]} for size in wanted]
    result = {
        "vocab_size": vocab_size,
        "num_tokens": int(counts.all.sum()),
        "num_supervised": int(counts.supervised.sum()),
        "num_distinct_supervised": int(np.count_nonzero(counts.supervised)),
        "coverage": table,
    }
    if as_json:
        console.print_json(result)
        return
    out = console.results()
    out.print(
        f"{result['num_supervised']:,} supervised of {result['num_tokens']:,} tokens, "
        f"{result['num_distinct_supervised']:,} of {vocab_size:,} ids"
    )
    for row in table:
        out.print(f"  {row['draft_vocab_size']:>7,} ids cover {100 * row['coverage']:.2f} %")


def _sizes(text: str, vocab_size: int) -> list[int]:
    """Draft vocabulary sizes of at most the vocabulary's."""
    from eyas.core.errors import ConfigError

    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise ConfigError(
            f"--sizes {text!r}: write positive whole numbers with commas between, as in 8192,16384"
        )
    return [size for size in sizes if size <= vocab_size]


def pieces(tokenizer: Any, ids: list[int], spans: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Text of alternating context and supervised stretches."""
    edges, pieces = [0, *(edge for span in spans for edge in span), len(ids)], []
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        if begin < end:
            text = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
            pieces.append({"text": text, "supervised": number % 2 == 1})
    return pieces


def coloured(parts: list[dict[str, Any]], *, marks: bool) -> "Text":
    """Supervised pieces in green, or, with `marks`, in angle brackets."""
    from rich.text import Text

    text = Text()
    for part in parts:
        before, after = "⟨⟩" if marks and part["supervised"] else ("", "")
        text.append(before + part["text"] + after, style="bold green" if part["supervised"] else "dim")
    return text
