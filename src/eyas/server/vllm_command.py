"""The `vllm serve` command that runs a target with an exported head: the way past one machine.

Tensor, pipeline and data parallelism are vLLM's; whatever its command line takes may be added. What is worked
out here is what a speculating server needs:

    --speculative-config         the head, its method and K; parallel_drafting for P-EAGLE
    --cudagraph-capture-sizes    a decode step verifies K + 1 rows a request, P-EAGLE drafts in a pass of 2 K
                                 rows a request: graphs of both sizes for batches of 1, 2, 4, ... requests
    --max-num-seqs               what the sizes were made for
"""

import json
from typing import Any

from eyas.core.errors import ConfigError


def graph_sizes(max_num_seqs: int, num_draft_tokens: int, *, parallel: bool) -> list[int]:
    """Return the row counts to capture graphs for; vLLM rounds them up to multiples of K + 1.

    Example, 4 requests at K = 3: 4, 8, 16 rows to verify; parallel also 6, 12, 24 rows to draft.
    """
    batches = [1 << i for i in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]
    rows = [num_draft_tokens + 1] + ([2 * num_draft_tokens] if parallel and num_draft_tokens else [])
    return sorted({batch * per_request for batch in batches for per_request in rows})


def vllm_command(
    model: str,
    speculative: dict[str, Any] | None,
    *,
    host: str,
    port: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    dtype: str | None = None,
    name: str | None = None,
    gpu_memory_fraction: float | None = None,
    extra: list[str] | None = None,
) -> list[str]:
    """Return the words of the command; `speculative` are vLLM's own settings, None for plain decoding.

    `extra` comes last, so it overrides. ConfigError where vLLM would draft nothing.
    """
    num_draft_tokens = int(speculative["num_speculative_tokens"]) if speculative else 0
    if speculative and num_draft_tokens < 1:
        raise ConfigError(f"num_speculative_tokens={num_draft_tokens} must be at least 1")
    words = ["vllm", "serve", model, "--host", host, "--port", str(port), "--max-num-seqs", str(max_num_seqs)]
    if speculative:
        parallel = bool(speculative.get("parallel_drafting"))
        sizes = graph_sizes(max_num_seqs, num_draft_tokens, parallel=parallel)
        words += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
        words += ["--cudagraph-capture-sizes", *map(str, sizes)]
    optional = {
        "--max-model-len": max_model_len,
        "--dtype": dtype,
        "--served-model-name": name,
        "--gpu-memory-utilization": gpu_memory_fraction,
    }
    for flag, value in optional.items():
        if value is not None:
            words += [flag, str(value)]
    return words + (extra or [])
