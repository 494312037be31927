"""`make test-vllm`: exported heads in the real vLLM, on a CPU, held against Eyas.

    python tests/vllm/check.py --vllm .venv-vllm/bin/python [--heads HEAD ...]

For every head: vLLM's greedy answers with it equal vLLM's own plain answers token for token, and its
acceptance by position equals that of Eyas on the same prompts within 2 %. Prints one JSON document; status
1 if any fails.

vLLM also counts drafts that were accepted behind the last token an answer may have; Eyas does not. Answers
are long enough for that to stay far below 2 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET, MAX_LEN, TOLERANCE = "smollm2-135m", 1024, 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="vLLM's Python")
    parser.add_argument("--heads", nargs="*", type=Path, default=sorted((ROOT / "heads").glob(f"{TARGET}-*")))
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("-k", type=int, help="drafts a step; 3 for EAGLE-3 and 7 for P-EAGLE unless given")
    options = parser.parse_args()

    import torch

    from eyas.bench.conversations import encode_chat
    from eyas.bench.workload import read_prompts
    from eyas.export.write import export_head
    from eyas.targets.folder import hf_folder
    from eyas.targets.load import load_target

    target = load_target(TARGET, device="cpu")
    prompts = [
        encode_chat(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for prompt in read_prompts("builtin", options.num_prompts)
    ]
    job = {
        "model": str(hf_folder(TARGET, torch.float32)),
        "prompts": prompts,
        "max_tokens": options.max_tokens,
        "max_model_len": MAX_LEN,
        "batch": len(prompts),
        "speculative": None,
    }
    with tempfile.TemporaryDirectory(prefix="eyas-vllm-") as scratch:
        plain = in_vllm(options.vllm, job, Path(scratch))
        results = []
        for head in options.heads:
            # vLLM knows no correction by the token before; Eyas runs what was exported, not more.
            written = Path(scratch) / head.name
            export = export_head(
                head, target, "vllm", written, num_draft_tokens=options.k, without_markov=True
            )
            theirs = in_vllm(options.vllm, job | {"speculative": export.serve}, Path(scratch))
            ours = in_eyas(target, written, int(export.serve["num_speculative_tokens"]), job)
            results.append({"head": head.name, "settings": export.serve} | judge(plain, theirs, ours))
    print(json.dumps({"versions": plain["versions"], "heads": results}, indent=1))
    sys.exit(0 if results and all(result["passed"] for result in results) else 1)


def in_vllm(python: Path, job: dict, scratch: Path) -> dict:
    """Answers and counters of vLLM, in a process of its own environment."""
    (scratch / "job.json").write_text(json.dumps(job))
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # absolute, not resolved: a virtual environment's Python is a link, and knows itself by the link's place.
    command = [str(python.absolute()), str(Path(__file__).with_name("run.py")), "job.json", "result.json"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1"} | dict(os.environ) | quiet
    done = subprocess.run(
        command,
        cwd=scratch,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        sys.exit(f"vLLM ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return json.loads((scratch / "result.json").read_text())


def in_eyas(target, head: Path, num_draft_tokens: int, job: dict) -> dict:
    """The same from Eyas."""
    from eyas import LLM, SamplingParams

    llm = LLM(
        target, str(head), num_draft_tokens=num_draft_tokens, max_model_len=MAX_LEN, max_num_seqs=job["batch"]
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    token_ids = llm.generate_ids(job["prompts"], params)
    stats = llm.stats
    return {
        "token_ids": token_ids,
        "counters": {
            "drafts": stats.drafted_row_steps,
            "accepted": stats.accepted,
            "by_position": stats.accepted_by_depth,
        },
    }


def judge(plain: dict, theirs: dict, ours: dict) -> dict:
    """What was compared, and whether it holds."""
    rates = {name: acceptance(part["counters"]) for name, part in (("vllm", theirs), ("eyas", ours))}
    lengths = {name: 1 + sum(values) for name, values in rates.items()}
    apart = max((abs(a - b) for a, b in zip(rates["vllm"], rates["eyas"], strict=True)), default=1.0)
    same = sum(a == b for a, b in zip(plain["token_ids"], theirs["token_ids"], strict=True))
    as_eyas = sum(a == b for a, b in zip(plain["token_ids"], ours["token_ids"], strict=True))
    close = apart <= TOLERANCE and abs(lengths["vllm"] / lengths["eyas"] - 1) <= TOLERANCE
    return {
        "answers": len(plain["token_ids"]),
        "equal_to_plain_vllm": same,
        "eyas_equal_to_plain_vllm": as_eyas,
        "drafts": {"vllm": theirs["counters"]["drafts"], "eyas": ours["counters"]["drafts"]},
        "acceptance_by_position": rates,
        "acceptance_length": lengths,
        "largest_difference": apart,
        "passed": same == len(plain["token_ids"]) and close,
    }


def acceptance(counters: dict) -> list[float]:
    """Share of drafts accepted at each position."""
    return [count / counters["drafts"] for count in counters["by_position"]]


if __name__ == "__main__":
    main()
