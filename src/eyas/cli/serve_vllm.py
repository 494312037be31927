"""`eyas serve --backend vllm`: export the head, write the `vllm serve` command, run it."""

import os
import shlex
import shutil
from pathlib import Path
from typing import NoReturn

from eyas.cli import console


def serve_with_vllm(
    target: str,
    heads: list[str],
    *,
    num_draft_tokens: int | None,
    refused: dict[str, bool],
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    max_num_seqs: int,
    max_model_len: int | None,
    gpu_memory_fraction: float,
    dtype: str | None,
    extra: str,
    without_markov: bool,
    print_command: bool,
) -> None:
    """Print the command or become it; `refused`: flags without a counterpart in vLLM, and whether given."""
    from eyas.core.errors import ConfigError
    from eyas.server.vllm_command import vllm_command

    given = [flag for flag, present in refused.items() if present]
    if given:
        raise ConfigError(f"--backend vllm has nothing like {', '.join(given)}; leave it out")
    if len(heads) > 1:
        raise ConfigError("--backend vllm runs one head; start a server for each")
    head = heads[0] if heads and heads[0] != "none" else None
    if head is not None and not Path(head).is_dir():
        raise ConfigError(f"--head {head}: --backend vllm runs head folders")
    model, speculative = _prepared(target, head, num_draft_tokens, dtype, without_markov=without_markov)
    words = vllm_command(
        model,
        speculative,
        host=host,
        port=port,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        dtype=dtype,
        name=name,
        gpu_memory_fraction=gpu_memory_fraction,
        extra=shlex.split(extra),
    )
    if print_command:
        print(shlex.join(words))
        return
    _become(words, api_key)


def _prepared(
    target: str, head: str | None, num_draft_tokens: int | None, dtype: str | None, *, without_markov: bool
) -> tuple[str, dict[str, object] | None]:
    """Return what vLLM loads: the target as a folder or hub name, and settings for the exported head."""
    from eyas.bench.records import folder_fingerprint
    from eyas.targets.folder import hf_folder
    from eyas.targets.weights.convert import cache_root

    # A GGUF file becomes a folder; folders and hub names are vLLM's to read.
    model = str(hf_folder(target, console.torch_dtype(dtype or "bfloat16")) or target)
    if head is None:
        return model, None
    from eyas.export.write import export_head
    from eyas.targets.load import load_target

    out = cache_root() / "exported" / f"{Path(head).resolve().name}-{folder_fingerprint(Path(head))}"
    loaded = load_target(target, device="cpu", tokenizer=False, pack=False)
    export = export_head(
        head, loaded, "vllm", out, num_draft_tokens=num_draft_tokens, without_markov=without_markov
    )
    without = "" if export.left_out is None else f" without {export.left_out}"
    console.notes().print(f"head exported to {export.folder}{without}", markup=False, soft_wrap=True)
    return model, export.serve


def _become(words: list[str], api_key: str | None) -> NoReturn:
    """Run the command in this process's place, so that signals reach it; the key goes by the environment."""
    from eyas.core.errors import ConfigError

    program = shutil.which(words[0])
    if program is None:
        raise ConfigError("vllm is not installed here: pip install vllm, or use --print-command")
    console.notes().print(shlex.join(words), markup=False, soft_wrap=True)
    environment = dict(os.environ) | ({"VLLM_API_KEY": api_key} if api_key else {})
    os.execve(program, words, environment)  # noqa: S606 -- the user asked for this program
