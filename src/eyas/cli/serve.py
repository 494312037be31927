"""`eyas serve`: an OpenAI-compatible server."""

from typing import Annotated

import typer

from eyas.cli import console


def command(
    target: Annotated[
        str, typer.Argument(help="Folder, GGUF file, hub name, or a name of `eyas models list`.")
    ],
    *,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            "--drafter",
            help="A head folder, prompt_lookup, small:PATH, or none. Given several times, each is served, "
            "as NAME:METHOD, and the first as NAME too.",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--num-draft-tokens", "-k", min=1, help="Drafts per step.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="Draft trees: DEPTHxTOP_KxNODES, such as 5x4x24. Heads only.")
    ] = None,
    sample_drafts: Annotated[
        bool, typer.Option("--sample-drafts", help="Draw drafts and verify by the rejection rule.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="127.0.0.1 is seen from this machine only; 0.0.0.0 from everywhere.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="EYAS_API_KEY", help="Key that clients must send; better in EYAS_API_KEY than here."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name of the model in the API.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Completions that run at once.")] = 64,
    max_queue: Annotated[int, typer.Option(min=0, help="Completions that may wait; beyond them, 429.")] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context limit; the target's own, at most 8192, unless given.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Longest request body.")] = 4 << 20,
    prefix_caching: Annotated[bool, typer.Option(help="Keep KV pages for requests that begin alike.")] = True,
    warm_graphs: Annotated[
        bool, typer.Option(help="Capture the usual CUDA graphs before serving, not at first use.")
    ] = False,
    num_pages: Annotated[int | None, typer.Option(help="KV pages; what memory allows unless given.")] = None,
    gpu_memory_fraction: Annotated[
        float, typer.Option(help="Share of the free GPU memory for the caches.")
    ] = 0.85,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="After SIGTERM, running requests may take so long.")
    ] = 60.0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on CPU and bfloat16 on CUDA unless given.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="eyas, or vllm: export the head and run `vllm serve`.")
    ] = "eyas",
    vllm_args: Annotated[
        str, typer.Option(help="More for `vllm serve`, such as '--tensor-parallel-size 2'.")
    ] = "",
    without_markov: Annotated[
        bool,
        typer.Option(
            "--without-markov", help="With --backend vllm: leave out a correction that it cannot run."
        ),
    ] = False,
    print_command: Annotated[bool, typer.Option(help="With --backend vllm: only show the command.")] = False,
) -> None:
    """Serve a target, with or without a head, to OpenAI's clients."""
    from eyas.core.errors import ConfigError

    if backend == "vllm":
        from eyas.cli.serve_vllm import serve_with_vllm

        serve_with_vllm(
            target,
            head or [],
            num_draft_tokens=k,
            refused={
                "--tree": tree is not None,
                "--sample-drafts": sample_drafts,
                "--num-pages": num_pages is not None,
                "--device": device is not None,
            },
            host=host,
            port=port,
            api_key=api_key,
            name=name,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            gpu_memory_fraction=gpu_memory_fraction,
            dtype=dtype,
            extra=vllm_args,
            without_markov=without_markov,
            print_command=print_command,
        )
        return
    if backend != "eyas" or print_command or vllm_args or without_markov:
        raise ConfigError(
            f"--backend {backend}: choose eyas or vllm"
            if backend != "eyas"
            else "--print-command, --vllm-args and --without-markov belong to --backend vllm"
        )
    try:
        from eyas.server.methods import share_of_rest
        from eyas.server.run import serve
        from eyas.server.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'eyas[serve]'") from error
    from eyas.engine.llm import LLM
    from eyas.targets.load import load_target

    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        model_name=name,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        drain_seconds=drain_seconds,
    )
    loaded = load_target(target, **console.device_and_dtype(device, dtype))
    heads: list[str | None] = [None if one == "none" else one for one in head or ["none"]]
    llms = [
        LLM(
            loaded,
            one,
            num_draft_tokens=k if one or len(heads) == 1 else None,
            sample_drafts=sample_drafts,
            tree=tree if one or len(heads) == 1 else None,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_pages=num_pages,
            prefix_caching=prefix_caching,
            warm_graphs=warm_graphs,
            gpu_memory_fraction=share_of_rest(gpu_memory_fraction, number, len(heads)),
        )
        for number, one in enumerate(heads)
    ]
    notes = console.notes()
    if api_key is None and host not in {"127.0.0.1", "localhost", "::1"}:
        notes.print(f"note: {host} is seen by others and no --api-key is set", style="yellow")
    drafters = ", ".join(
        "plain" if llm.drafter is None else f"{llm.drafter.name} K = {llm.num_draft_tokens}" for llm in llms
    )
    served = name or loaded.identity.name

    def ready(address: str) -> None:
        notes.print(f"{served} ({drafters}) at {address}/v1", markup=False, soft_wrap=True)
        notes.print(f"a page to try it: {address}", markup=False, soft_wrap=True)

    if not serve(llms, settings, on_ready=ready):
        raise typer.Exit(1)
