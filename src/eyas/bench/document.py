"""The JSON of a comparison. Its fields are described in docs/benchmarks/compare-json.md and kept stable."""

from dataclasses import asdict
from typing import Any

from eyas.bench.analyze import MethodResult
from eyas.bench.offline import Comparison

SCHEMA = "eyas.compare/2"


def compare_document(
    comparison: Comparison, setup: dict[str, Any], provenance: dict[str, Any]
) -> dict[str, Any]:
    """Return plain JSON values: what ran, the table, the best K per head, one prompt in full, raw samples."""
    return {
        "schema": SCHEMA,
        "setup": setup,
        "methods": [_row(result) for result in comparison.results],
        "best": [
            {"spec": row.spec, "num_draft_tokens": row.num_draft_tokens, "speedup": round(row.speedup, 4)}
            for row in comparison.best
        ],
        "example": {
            "prompt": comparison.prompt,
            "answers": {name: asdict(answer) for name, answer in comparison.answers.items()},
        },
        "samples": [
            {
                "method": sample.method,
                "round": sample.round,
                "prompt_ids": list(sample.prompt_ids),
                "seconds": round(sample.seconds, 6),
                "tokens": sample.tokens,
                "steps": sample.steps,
                "draft_steps": sample.draft_steps,
                "accepted_by_depth": list(sample.accepted_by_depth),
            }
            for sample in comparison.samples
        ],
        "provenance": provenance,
    }


def _row(result: MethodResult) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in asdict(result).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return [_rounded(item) for item in value] if isinstance(value, list) else value
