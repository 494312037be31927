"""`eyas data`: regenerate, pack, show, count, trim, capture."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import console, data_capture, data_trim

if TYPE_CHECKING:
    from rich.text import Text

    from eyas.data.regenerate import Progress
    from eyas.data.template import ChatTemplate

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
app.command("trim")(data_trim.command)
app.command("capture")(data_capture.command)

TargetOption = Annotated[
    str, typer.Option(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
]
OptionalTarget = Annotated[
    str | None, typer.Option("--target", help="Whose tokenizer and chat template to use.")
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option", help="name=JSON for the chat template (enable_thinking=false). Repeat it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def regenerate(
    prompts: Annotated[Path, typer.Argument(help="JSONL or JSONL.gz with id and prompt, turns or messages.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the answers; a run that stopped goes on in it.")],
    target: OptionalTarget = None,
    drafter: Annotated[
        str | None, typer.Option(help="A head folder or prompt_lookup, to answer faster.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible URL (http://host:8000/v1) that answers instead. Repeat it."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model name for the endpoint.")] = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for the endpoint.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once to the endpoints.")] = 32,
    temperatures: Annotated[str, typer.Option(help="temperature:share, ...")] = "0:0.7,0.7:0.3",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="A turn's answer at most.")] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled answers.")] = 0,
    shard_size: Annotated[int, typer.Option(min=1, help="Conversations in a shard.")] = 1000,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests decoded at once.")] = None,
    template_option: TemplateOption = None,
    store: Annotated[bool, typer.Option(help="Build the token store in OUT/store at the end.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let the target answer prompts itself: the data that a head is trained on."""
    from dataclasses import replace

    from eyas.core.errors import ConfigError, DataError
    from eyas.data.build import build_store
    from eyas.data.files import sha256_file
    from eyas.data.regenerate import IdAnswerer, RegenerateConfig
    from eyas.data.regenerate import regenerate as answer
    from eyas.data.sources import read_prompts

    config = RegenerateConfig(
        temperatures=_temperatures(temperatures),
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
        shard_size=shard_size,
    )
    todo = read_prompts(prompts, limit=limit)
    about: dict[str, Any] = {"source": {"file": prompts.name, "sha256": sha256_file(prompts)}}
    options = _template_options(template_option)
    loaded = template = None
    if target is not None:
        from eyas.targets.load import load_target

        loaded = load_target(target, **console.device_and_dtype(device, dtype), pack=not endpoint)
        template = _template(loaded, options)
        about |= {
            "target": loaded.identity.name,
            "fingerprint": loaded.identity.fingerprint,
            "template": options,
        }
    answerer: Any
    if endpoint:
        from eyas.data.endpoint import EndpointAnswerer

        answerer = EndpointAnswerer(
            urls=tuple(endpoint),
            model=model,
            api_key=api_key,
            concurrency=concurrency,
            template_options=options,
        )
        about |= {"endpoint_model": model} | ({"template": options} if options else {})
    elif loaded is not None and template is not None:
        from eyas.engine.llm import LLM

        on_cuda = loaded.device.type == "cuda"
        seqs = max_num_seqs or (512 if on_cuda else 8)
        llm = LLM(
            loaded,
            drafter,
            max_num_seqs=seqs,
            max_model_len=min(loaded.config.max_position_embeddings, max_prompt_tokens + max_new_tokens + 64),
            admit_together=max(1, seqs // 16) if on_cuda else 1,
        )
        answerer = IdAnswerer(template, llm.iterate_ids)
        # Whatever the engine could not take is left out as too long, not refused halfway.
        config = replace(config, max_prompt_tokens=min(max_prompt_tokens, llm.max_model_len - 1))
    else:
        raise ConfigError(
            "give --target to answer with the engine here, or --endpoint for a server that does"
        )
    with _progress("answering", len(todo)) as report:
        manifest = answer(todo, answerer, out, config, about=about, progress=report)
    refused = ""
    if endpoint and answerer.num_refused:
        refused = f"; the endpoint refused {answerer.num_refused} requests, the last with: {answerer.refusal}"
    if not manifest["num_conversations"]:
        raise DataError(
            f"{prompts}: none of {len(todo)} prompts was answered; longer ones than --max-prompt-tokens "
            f"{config.max_prompt_tokens} are left out, empty answers too{refused}"
        )
    if refused:
        console.notes().print(refused.removeprefix("; "), markup=False)
    result = {"answers": manifest, "store": None}
    if store and loaded is not None:
        result["store"] = build_store(
            out, out / "store", vocab_size=loaded.config.vocab_size, template=template, meta=about
        )
    _tell(result, as_json, out)


@app.command()
def pack(
    conversations: Annotated[Path, typer.Argument(help="JSONL of conversations, or a folder of shards.")],
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
    options = _template_options(template_option)
    manifest = build_store(
        conversations,
        out,
        vocab_size=loaded.config.vocab_size,
        template=_template(loaded, options),
        meta={
            "target": loaded.identity.name,
            "fingerprint": loaded.identity.fingerprint,
            "template": options,
        },
        last_turn_only=last_turn_only,
        max_tokens=max_tokens,
    )
    _tell({"answers": None, "store": manifest}, as_json, out)


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


def _template(loaded: Any, options: dict[str, Any]) -> "ChatTemplate":
    from eyas.data.template import ChatTemplate

    return ChatTemplate(loaded.tokenizer, end_ids(loaded), options=options)


def end_ids(loaded: Any) -> tuple[int, ...]:
    """Ids that end an answer: the model's and the tokenizer's."""
    ids = set(loaded.config.eos_token_ids)
    if loaded.tokenizer is not None and loaded.tokenizer.eos_token_id is not None:
        ids.add(int(loaded.tokenizer.eos_token_id))
    return tuple(sorted(ids))


def _template_options(pairs: list[str] | None) -> dict[str, Any]:
    from eyas.core.errors import ConfigError

    options = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ConfigError(f"--template-option {pair!r}: write name=JSON, as in enable_thinking=false")
    return options


def _temperatures(text: str) -> dict[float, float]:
    from eyas.core.errors import ConfigError

    try:
        pairs = {float(t): float(share) for t, share in (item.split(":") for item in text.split(","))}
    except ValueError as error:
        raise ConfigError(f"--temperatures {text!r}: write temperature:share, as in 0:0.7,0.7:0.3") from error
    # Comparisons with NaN are false, so it is refused with the rest.
    if not all(0 <= t <= 100 for t in pairs) or not all(0 <= share <= 1e6 for share in pairs.values()):
        raise ConfigError(f"--temperatures {text!r}: temperatures go from 0 to 100, shares from 0 on")
    if sum(pairs.values()) == 0:
        raise ConfigError(f"--temperatures {text!r}: no temperature has a share")
    return pairs


@contextmanager
def _progress(what: str, total: int) -> Iterator["Progress"]:
    """A bar on stderr with tokens a second and time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.notes()) as bar:
        task = bar.add_task(what, total=total, rate=0.0)

        def report(done: int, _total: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, rate=tokens / elapsed if elapsed else 0.0)

        yield report


def _tell(result: dict[str, Any], as_json: bool, out: Path) -> None:
    if as_json:
        console.print_json(result)
        return
    printer = console.results()
    answers, store = result["answers"], result["store"]
    if answers is not None:
        printer.print(
            f"{answers['num_conversations']:,} conversations, {answers['num_answers']:,} answers, "
            f"{answers['num_generated']:,} tokens in {answers['seconds']:,.0f} s "
            f"({answers['tokens_per_second']:,.0f} tok/s), {answers['num_skipped']:,} left out"
        )
    if store is not None:
        printer.print(
            f"token store: {store['num_documents']:,} documents, {store['num_tokens']:,} tokens, "
            f"{store['num_supervised']:,} supervised, hash {store['hash'][:12]}"
        )
    printer.print(f"in {out}")
