"""Records as `eyas bench sweep` writes them, with numbers chosen by hand."""

import json
from pathlib import Path

from eyas.bench.sweep import SCHEMA


def cell(method, k, tokens_per_second, *, steps=None, drafts=None, **over):
    """One line; `steps` as `step` makes them, `drafts` accepted by position, of 100."""
    where = {
        "method": method,
        "num_draft_tokens": k,
        "head_fingerprint": None,
        "engine": "local",
        "dataset": "mt_bench",
        "concurrency": 1,
        "rate": None,
        "repeat": 0,
        "target": "tiny",
        "target_fingerprint": "f",
        "machine": "GPU <1>",
        "dtype": "bfloat16",
        "max_tokens": 256,
        "temperature": 0.0,
        "ignore_eos": False,
    } | over
    result = {"output_tokens_per_second": tokens_per_second, "acceptance": {}, "steps": steps or {}}
    result["ttft_ms"] = result["itl_ms"] = result["tpot_ms"] = {"p50": 2.0, "p99": 3.0}
    if drafts:
        result["acceptance"] = {
            "acceptance_length": 1 + sum(drafts) / 100,
            "acceptance_by_position": [n / 100 for n in drafts],
            "conditional_acceptance_by_position": [
                n / max(m, 1) for n, m in zip(drafts, [100, *drafts], strict=False)
            ],
            "num_drafts": 100.0,
            "num_accepted": float(sum(drafts)),
        }
    return {"schema": SCHEMA, "type": "cell", "id": "x", "run": "r", "cell": where, "result": result}


def step(per_forward, ms, *, rows=1.0, **phases):
    parts = {"verify_ms": ms, "draft_ms": 0.0, "prefill_ms": 0.0, "other_ms": 0.0} | phases
    return {"tokens_per_forward": per_forward, "rows_per_step": rows, "step_ms": ms, **parts}


def write(path: Path, *lines) -> Path:
    run = {
        "schema": SCHEMA,
        "type": "run",
        "run": "r",
        "provenance": {
            "time": "2026-01-01",
            "command": "eyas bench sweep <x>",
            "commit": "abc",
            "versions": {},
        },
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in (run, *lines)))
    return path
