"""What the verbs of `eyas data` share: options, how they are read, progress and the last lines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli import console

if TYPE_CHECKING:
    from eyas.data.regenerate_dialog import Progress
    from eyas.data.template import ChatTemplate

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
EndpointModel = Annotated[str, typer.Option("--model", help="Model name for the endpoint.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Key for the endpoint.")
]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once to the endpoints.")]
RequestRate = Annotated[
    float | None,
    typer.Option("--requests-per-minute", min=1e-3, help="To each endpoint at most; no limit unless given."),
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", min=1, help="Requests decoded at once.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; cuda where there is one.")]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32 on CPU and bfloat16 on CUDA unless given."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def chat_template(loaded: Any, options: dict[str, Any]) -> "ChatTemplate":
    """The chat template of a loaded target; DataError where it has none."""
    from eyas.data.template import ChatTemplate

    return ChatTemplate(loaded.tokenizer, end_ids(loaded), options=options)


def end_ids(loaded: Any) -> tuple[int, ...]:
    """Ids that end an answer: the model's and the tokenizer's."""
    ids = set(loaded.config.eos_token_ids)
    if loaded.tokenizer is not None and loaded.tokenizer.eos_token_id is not None:
        ids.add(int(loaded.tokenizer.eos_token_id))
    return tuple(sorted(ids))


def parse_template_options(pairs: list[str] | None) -> dict[str, Any]:
    """Read name=JSON pairs; ["enable_thinking=false"] -> {"enable_thinking": False}."""
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


def parse_temperatures(text: str) -> dict[float, float]:
    """Read temperatures and shares; "0:0.7,0.7:0.3" -> {0.0: 0.7, 0.7: 0.3}."""
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


def bulk_engine(
    loaded: Any, drafter: str | None, max_num_seqs: int | None, max_tokens: int, *, on_cuda: int = 512
) -> Any:
    """An engine for many requests of at most `max_tokens`; `on_cuda` of them at once there, 8 on the CPU."""
    from eyas.engine.llm import LLM

    cuda = loaded.device.type == "cuda"
    seqs = max_num_seqs or (on_cuda if cuda else 8)
    return LLM(
        loaded,
        drafter,
        max_num_seqs=seqs,
        max_model_len=min(loaded.config.max_position_embeddings, max_tokens),
        admit_together=max(1, seqs // 16) if cuda else 1,
    )


@contextmanager
def token_progress(what: str, total: int) -> Iterator["Progress"]:
    """A bar on stderr with tokens a second and time left."""
    with console.progress(rate=True) as bar:
        task = bar.add_task(what, total=total, rate=0.0)

        def report(done: int, total: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, total=total, rate=tokens / elapsed if elapsed else 0.0)

        yield report


def tell(result: dict[str, Any], as_json: bool, out: Path) -> None:
    """Print what was answered and stored."""
    if as_json:
        console.print_json(result)
        return
    printer = console.results()
    answers, store = result["answers"], result["store"]
    if answers is not None:
        written = answers.get("num_written", 0)
        printer.print(
            f"{answers['num_conversations']:,} conversations, {answers['num_answers']:,} answers, "
            + (f"{written:,} user turns written, " if written else "")
            + f"{answers['num_generated']:,} tokens in {answers['seconds']:,.0f} s "
            f"({answers['tokens_per_second']:,.0f} tok/s), {answers['num_skipped']:,} left out"
        )
    if store is not None:
        printer.print(
            f"token store: {store['num_documents']:,} documents, {store['num_tokens']:,} tokens, "
            f"{store['num_supervised']:,} supervised, hash {store['hash'][:12]}"
        )
    printer.print(f"in {out}")
