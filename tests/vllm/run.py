"""Runs in vLLM's own environment: greedy answers of token-id prompts, and what was drafted and accepted.

    python run.py JOB.json RESULT.json

The job: model, prompts (token ids), max_tokens, max_model_len, speculative (vLLM's settings, or null).
"""

import json
import sys
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    import vllm
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=job["batch"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative"],
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params)
    result = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters(llm.get_metrics()),
        "versions": {"vllm": vllm.__version__, "torch": __import__("torch").__version__},
    }
    Path(result_file).write_text(json.dumps(result))


def counters(metrics) -> dict:
    """Drafts, and accepted drafts by position."""
    found = {"drafts": 0, "accepted": 0, "by_position": []}
    for metric in metrics:
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            found["accepted"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["by_position"] = list(metric.values)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
