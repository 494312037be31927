"""Slow, obvious twins of what the sampler and the verification do: one row at a time, in plain Python."""

import math
from collections import Counter

from eyas.core.sampling import SamplingParams

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: int) -> float:
    state = mix((seed + GOLDEN) & MASK)
    bits = mix((state + (position * 8 + stream + 1) * GOLDEN) & MASK)
    return ((bits >> 12) + 0.5) / 2**52


def draw(probs: list[float], u: float) -> int:
    """First token whose cumulative probability exceeds u times the total."""
    threshold = u * math.fsum(probs)
    total = 0.0
    last = 0
    for token, p in enumerate(probs):
        if p > 0:
            total += p
            last = token
            if total > threshold:
                return token
    return last


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def shape(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], stop_ids: set[int]
) -> list[float]:
    """Bias, min-tokens and penalties."""
    counts = Counter(output)
    seen = set(prompt) | set(output)
    shaped = []
    for token, value in enumerate(logits):
        x = value + params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in stop_ids:
            x = -math.inf
        if token in seen:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * counts[token]
        if token in counts:
            x -= params.presence_penalty
        shaped.append(x)
    return shaped


def kept_tokens(probs: list[float], params: SamplingParams) -> set[int]:
    """Token ids that min-p, top-k and top-p leave."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = [token for token in order if probs[token] >= params.min_p * probs[order[0]]]
    if 0 < params.top_k < len(kept):
        kept = [token for token in kept if probs[token] >= probs[kept[params.top_k - 1]]]
    if params.top_p < 1.0:
        total = math.fsum(probs[token] for token in kept)
        nucleus: list[int] = []
        while math.fsum(probs[token] for token in nucleus) / total < params.top_p and len(nucleus) < len(
            kept
        ):
            nucleus.append(kept[len(nucleus)])
        kept = nucleus
    return set(kept)


def target_probs(
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    stop_ids: set[int] = frozenset(),
) -> list[float]:
    """The distribution that one token is chosen from, after all processors."""
    shaped = shape(logits, params, prompt, output, stop_ids)
    if params.greedy:
        best = shaped.index(max(shaped))
        return [float(token == best) for token in range(len(shaped))]
    probs = softmax([x / params.temperature for x in shaped])
    kept = kept_tokens(probs, params)
    total = math.fsum(probs[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]
