"""`eyas data regenerate`: the target answers prompts."""

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
    OptionalTarget,
    RequestRate,
    TemplateOption,
    bulk_engine,
    chat_template,
    parse_temperatures,
    parse_template_options,
    tell,
    token_progress,
)


def command(
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
    model: EndpointModel = "",
    api_key: ApiKey = None,
    concurrency: Concurrency = 32,
    requests_per_minute: RequestRate = None,
    temperatures: Annotated[str, typer.Option(help="temperature:share, ...")] = "0:0.7,0.7:0.3",
    samples: Annotated[
        int,
        typer.Option(min=1, help="Answers to each prompt, spread over the temperatures; one at 0 at most."),
    ] = 1,
    follow_ups: Annotated[
        int,
        typer.Option(min=0, help="User turns that the target writes itself and answers, at most so many."),
    ] = 0,
    follow_up_temperature: Annotated[float, typer.Option(help="Of the user turns it writes.")] = 0.8,
    follow_up_top_p: Annotated[float, typer.Option(help="Of the user turns it writes.")] = 1.0,
    max_follow_up_tokens: Annotated[
        int, typer.Option(min=2, help="A user turn that does not end by then ends its conversation.")
    ] = 256,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="A turn's answer at most.")] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled answers.")] = 0,
    shard_size: Annotated[int, typer.Option(min=1, help="Conversations in a shard.")] = 1000,
    max_num_seqs: MaxNumSeqs = None,
    template_option: TemplateOption = None,
    store: Annotated[bool, typer.Option(help="Build the token store in OUT/store at the end.")] = True,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: Json = False,
) -> None:
    """Let the target answer prompts itself: the data that a head is trained on."""
    from dataclasses import replace

    from eyas.core.errors import ConfigError, DataError
    from eyas.data.build import build_store
    from eyas.data.files import sha256_file
    from eyas.data.follow_ups import FollowUpWriter
    from eyas.data.regenerate import IdAnswerer
    from eyas.data.regenerate import regenerate as answer
    from eyas.data.regenerate_dialog import RegenerateConfig
    from eyas.data.sources import read_prompts

    config = RegenerateConfig(
        temperatures=parse_temperatures(temperatures),
        samples=samples,
        follow_ups=follow_ups,
        follow_up_temperature=follow_up_temperature,
        follow_up_top_p=follow_up_top_p,
        max_follow_up_tokens=max_follow_up_tokens,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
        shard_size=shard_size,
    )
    todo = read_prompts(prompts, limit=limit)
    about: dict[str, Any] = {"source": {"file": prompts.name, "sha256": sha256_file(prompts)}}
    options = parse_template_options(template_option)
    loaded = template = None
    if target is not None:
        from eyas.targets.load import load_target

        loaded = load_target(target, **console.device_and_dtype(device, dtype), pack=not endpoint)
        template = chat_template(loaded, options)
        about |= {
            "target": loaded.identity.name,
            "fingerprint": loaded.identity.fingerprint,
            "template": options,
        }
    answerer: Any
    generate: Any = None
    if endpoint:
        from eyas.data.endpoint import EndpointAnswerer

        answerer = EndpointAnswerer(
            urls=tuple(endpoint),
            model=model,
            api_key=api_key,
            concurrency=concurrency,
            requests_per_minute=requests_per_minute,
            template_options=options,
        )
        if template is not None and follow_ups:
            generate = answerer.continuing(template.tokenizer, template.user_end_id())
        about |= {"endpoint_model": model} | ({"template": options} if options else {})
    elif loaded is not None and template is not None:
        llm = bulk_engine(loaded, drafter, max_num_seqs, max_prompt_tokens + max_new_tokens + 64)
        generate = llm.iterate_ids
        answerer = IdAnswerer(template, generate)
        # Whatever the engine could not take is left out as too long, not refused halfway.
        config = replace(config, max_prompt_tokens=min(max_prompt_tokens, llm.max_model_len - 1))
    else:
        raise ConfigError(
            "give --target to answer with the engine here, or --endpoint for a server that does"
        )
    if follow_ups and template is None:
        raise ConfigError("--follow-ups needs --target, whose chat template opens a user's turn")
    users = FollowUpWriter(template, generate) if follow_ups and template is not None else None
    with token_progress("answering", len(todo)) as report:
        manifest = answer(todo, answerer, out, config, about=about, users=users, progress=report)
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
    tell(result, as_json, out)
