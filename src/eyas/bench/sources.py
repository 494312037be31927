"""What the methods' authors published, to stand beside what was measured here.

P-EAGLE: vLLM blog, 13 March 2026: gpt-oss-20b (MXFP4), one B200, temperature 0, chains, each method at its
best K (P-EAGLE 7 with a head of four layers, EAGLE-3 3 with a head of one layer and other training data:
not heads of equal capacity). Another model on another GPU: shapes compare, values do not.
"""

SOURCE = "P-EAGLE, vLLM blog 2026-03-13: gpt-oss-20b on one B200"

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
PEAGLE_OVER_EAGLE3: dict[str, tuple[float, ...]] = {
    "MT-Bench": (1.55, 1.29, 1.35, 1.28, 1.27, 1.09, 1.05),
    "HumanEval": (1.55, 1.53, 1.45, 1.35, 1.31, 1.37, 1.23),
    "SPEED-Bench": (1.69, 1.61, 1.54, 1.45, 1.40, 1.22, 1.25),
}
"""Throughput of P-EAGLE over that of EAGLE-3, by concurrency."""

ACCEPTANCE_LENGTH: dict[str, dict[str, dict[int, float]]] = {
    "MT-Bench": {"peagle": {3: 2.87, 7: 3.70}, "eagle3": {3: 2.70, 7: 3.27}},
    "HumanEval": {"peagle": {3: 3.02, 7: 3.94}, "eagle3": {3: 2.65, 7: 3.03}},
    "SPEED-Bench": {"peagle": {3: 2.87, 7: 3.38}, "eagle3": {3: 2.24, 7: 2.59}},
}
"""Data set -> method -> K -> tokens a target forward, the target's own included."""


def source_name(dataset: str) -> str | None:
    """Return the source's name of a data set: "eagle_humaneval" -> "HumanEval"; None if it has none."""
    flat = dataset.lower().replace("-", "_").replace(" ", "_")
    for ours, theirs in (
        ("mt_bench", "MT-Bench"),
        ("humaneval", "HumanEval"),
        ("speed_bench", "SPEED-Bench"),
    ):
        if ours in flat:
            return theirs
    return None


def published_ratio(dataset: str, concurrency: int | None) -> float | None:
    """Return P-EAGLE over EAGLE-3 as published for this data set and concurrency; None if it was not."""
    name = source_name(dataset)
    if name is None or concurrency not in CONCURRENCIES:
        return None
    return PEAGLE_OVER_EAGLE3[name][CONCURRENCIES.index(concurrency)]
