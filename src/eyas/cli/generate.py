"""`eyas generate`: answer one prompt, with or without a drafter."""

import sys
from typing import Annotated, Any

import typer

from eyas.cli import console


def command(
    prompt: Annotated[str, typer.Argument(help="The user's message; '-' reads it from stdin.")],
    *,
    target: Annotated[
        str, typer.Option(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
    ],
    drafter: Annotated[str | None, typer.Option(help="A head folder, prompt_lookup, or small:PATH.")] = None,
    k: Annotated[int | None, typer.Option("--num-draft-tokens", "-k", min=1, help="Drafts per step.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="Draft trees: DEPTHxTOP_KxNODES, such as 5x4x24. Heads only.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text. Repeat the option.")] = None,
    raw: Annotated[bool, typer.Option(help="Give the prompt as it is, without the chat template.")] = False,
    stream: Annotated[bool, typer.Option(help="Print text as it comes.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Answer one prompt, with or without a drafter."""
    from eyas.core.errors import RequestError
    from eyas.core.sampling import SamplingParams
    from eyas.engine.llm import LLM
    from eyas.targets.load import load_target

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    loaded = load_target(target, **console.device_and_dtype(device, dtype))
    llm = LLM(loaded, drafter, num_draft_tokens=k, tree=tree, max_num_seqs=1)
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = _encode(loaded.tokenizer, text, raw=raw)
    output = None
    shown = 0
    # The line's end would wipe out text that stands before it.
    with console.capture_status(lambda: not as_json and not (shown and sys.stdout.isatty())) as captures:
        for output in llm.stream(ids, params):
            if stream and not as_json:
                answer = output.outputs[0].text
                print(answer[shown:], end="", flush=True)
                shown = len(answer)
    assert output is not None, "a stream yields at least its final output"
    if output.error is not None:
        raise RequestError(f"the request ended early: {output.error}")
    completion = output.outputs[0]
    if as_json:
        console.print_json(_document(llm, output))
        return
    print(completion.text[shown:])
    stats = llm.stats
    console.notes().print(
        f"{len(completion.token_ids)} tokens, {stats.tokens_per_forward:.2f} per target forward, "
        f"{stats.committed / stats.wall_seconds:.1f} tok/s, ended by {completion.finish_reason}"
        + (f", {sum(captures):.1f} s of it capturing CUDA graphs" if captures else ""),
        style="dim",
    )


def _encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    from eyas.bench.conversations import encode_chat

    if raw:
        return list(tokenizer(text)["input_ids"])
    return encode_chat(tokenizer, [{"role": "user", "content": text}])


def _document(llm: Any, output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "origins": completion.origins,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "stats": llm.stats.as_dict(),
    }
