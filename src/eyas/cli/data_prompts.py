"""`eyas data prompts`: the target writes prompts itself."""

from pathlib import Path
from typing import Annotated, Any

import typer

from eyas.cli import console
from eyas.cli.data_options import (
    ApiKey,
    Concurrency,
    DeviceOption,
    DtypeOption,
    EndpointModel,
    Json,
    MaxNumSeqs,
    RequestRate,
    TargetOption,
    TemplateOption,
    bulk_engine,
    chat_template,
    parse_temperatures,
    parse_template_options,
    token_progress,
)

TOPIC_SYSTEM = "You are a helpful assistant. The user's message is about {topic}."


def command(
    *,
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="Folder of the prompts; a run that stopped goes on in it.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts to keep.")] = 1000,
    temperatures: Annotated[str, typer.Option(help="temperature:share, ...")] = "0.8:1,1:1",
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Other seeds give other prompts.")] = 0,
    source: Annotated[str, typer.Option(help="Begins the prompts' ids.")] = "self",
    system: Annotated[
        list[str] | None,
        typer.Option(help="System message to vary prompts; {topic} stands for a topic. Repeat it."),
    ] = None,
    topics: Annotated[
        Path | None, typer.Option(help="File of topics, one a line, for the system message.")
    ] = None,
    keep_system: Annotated[bool, typer.Option(help="Leave the system message in the prompts.")] = False,
    min_tokens: Annotated[int, typer.Option(min=1, help="Shorter prompts are left out.")] = 4,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Prompts that do not end by then are left out.")
    ] = 512,
    alike: Annotated[
        float, typer.Option(help="Share of common three-word runs from which two prompts are one.")
    ] = 0.7,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL of prompts that must not come again (benchmarks). Repeat it."),
    ] = None,
    exclude_share: Annotated[
        float, typer.Option(help="Share of eight-word runs from which a prompt counts as excluded.")
    ] = 0.2,
    max_draws: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many texts; 10 times --count unless given.")
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option(min=1, help="Texts between two writes to the disk; 16 on the CPU and 256 elsewhere."),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="A head folder or prompt_lookup, to write faster.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible URL whose /completions writes instead. Repeat it."),
    ] = None,
    model: EndpointModel = "",
    api_key: ApiKey = None,
    concurrency: Concurrency = 32,
    requests_per_minute: RequestRate = None,
    max_num_seqs: MaxNumSeqs = None,
    template_option: TemplateOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: Json = False,
) -> None:
    """Let the target write prompts itself: its chat template is opened where a user's text begins.

    OUT/prompts.jsonl is what `eyas data regenerate` reads.
    """
    from eyas.core.errors import DataError
    from eyas.data.prompts import Pace, PromptsConfig, write_prompts
    from eyas.data.sources import Prompt, read_prompts
    from eyas.targets.load import load_target

    config = PromptsConfig(
        temperatures=parse_temperatures(temperatures),
        top_p=top_p,
        seed=seed,
        source=source,
        systems=systems(system, topics),
        keep_system=keep_system,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        alike=alike,
        known=exclude_share,
    )
    excluded: list[Prompt] = [prompt for path in exclude or [] for prompt in read_prompts(path)]
    loaded = load_target(target, **console.device_and_dtype(device, dtype), pack=not endpoint)
    options = parse_template_options(template_option)
    template = chat_template(loaded, options)
    about: dict[str, Any] = {
        "target": loaded.identity.name,
        "fingerprint": loaded.identity.fingerprint,
        "template": options,
    }
    if endpoint:
        from eyas.data.endpoint import EndpointAnswerer

        answerer = EndpointAnswerer(
            urls=tuple(endpoint),
            model=model,
            api_key=api_key,
            concurrency=concurrency,
            requests_per_minute=requests_per_minute,
        )
        generate = answerer.continuing(loaded.tokenizer, template.user_end_id())
        about |= {"endpoint_model": model}
    else:
        longest = max(len(template.user_ids(opening)) for opening in config.openings)
        llm = bulk_engine(loaded, drafter, max_num_seqs, longest + max_tokens + 64, on_cuda=1024)
        generate = llm.iterate_ids
    slow = not endpoint and loaded.device.type == "cpu"
    pace = Pace(max_draws=max_draws or 10 * count, shard_size=shard_size or (16 if slow else 256))
    with token_progress("writing", count) as report:
        manifest = write_prompts(
            count, template, generate, out, config, pace, about=about, excluded=excluded, progress=report
        )
    faults = ", ".join(f"{number:,} {name}" for name, number in manifest["faults"].items())
    if not manifest["num_prompts"]:
        raise DataError(f"{out}: none of {manifest['num_draws']:,} texts was kept ({faults})")
    if as_json:
        console.print_json(manifest)
        return
    console.results().print(
        f"{manifest['num_prompts']:,} prompts from {manifest['num_draws']:,} texts, "
        f"{manifest['num_tokens']:,} tokens in {manifest['seconds']:,.0f} s "
        f"({manifest['tokens_per_second']:,.0f} tok/s)\n"
        f"left out: {faults or 'none'}\nin {out / 'prompts.jsonl'}"
    )
    if manifest["num_prompts"] < count:
        console.notes().print(
            f"{count - manifest['num_prompts']:,} fewer than asked for: "
            f"--max-draws {pace.max_draws} was reached"
        )


def systems(texts: list[str] | None, topics: Path | None) -> tuple[str, ...]:
    """System messages: every text with every topic, topics changing fastest."""
    from eyas.core.errors import ConfigError

    if topics is None:
        return tuple(texts or ())
    try:
        lines = [line.strip() for line in topics.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--topics {topics}: cannot be read: {error}") from None
    lines = [line for line in lines if line]
    if not lines:
        raise ConfigError(f"--topics {topics}: the file has no topic; write one a line")
    patterns = texts or [TOPIC_SYSTEM]
    if not any("{topic}" in text for text in patterns):
        raise ConfigError("--system: write {topic} where a topic of --topics shall stand")
    return tuple(pattern.replace("{topic}", line) for pattern in patterns for line in lines)
