"""Compare ways of decoding in one process: the same target, the same prompts, interleaved.

Every method has its own engine; all share the target's weights. For each round and each batch of prompts all
methods answer one after another (the order rotates), so that what slows the machine slows all of them. Plain
decoding is always among them: speedups are ratios taken within the run, and its tokens are what the others'
are compared with.

This is the one file of `bench` that touches the engine. Turning samples into numbers is in `analyze`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.bench.analyze import MethodResult, Sample, best_per_spec, summarize
from eyas.bench.conversations import batches, encode_chat, token_pieces
from eyas.bench.workload import Prompt
from eyas.core.errors import ConfigError
from eyas.core.tree import TreeBudget

if TYPE_CHECKING:
    from eyas.core.outputs import RequestOutput
    from eyas.engine.llm import LLM
    from eyas.targets.base import Target

PLAIN = "plain"
WARMUP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the comparison: a drafter (None for plain decoding) and its K, or its tree."""

    name: str
    spec: str | None
    num_draft_tokens: int
    tree: TreeBudget | None = None


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is held equal for all methods."""

    max_tokens: int = 128
    batch: int = 1
    temperature: float = 0.0
    rounds: int = 3
    turns: int = 1
    """Turns of each conversation that are answered; later turns follow plain decoding's answers."""
    seed: int = 0
    time_limit: float | None = None
    """Seconds; a round that would end later is left out, but the first is always made."""


@dataclass(slots=True)
class Answer:
    """One method's answer to the prompt that is shown in full."""

    text: str
    token_ids: list[int]
    origins: list[int]
    pieces: list[str]
    """Text of each token; a token inside a multi-byte character has "" and the last one all of it."""


@dataclass(slots=True)
class Comparison:
    """Everything that a run measured."""

    methods: list[Method]
    samples: list[Sample]
    results: list[MethodResult]
    best: list[MethodResult]
    prompt: str
    """The prompt whose answers are in `answers`: the first one."""
    answers: dict[str, Answer]


def plan_methods(
    heads: Sequence[str], also: Sequence[str], ks: Sequence[int], trees: Sequence[TreeBudget] = ()
) -> list[Method]:
    """Return plain decoding, then every drafter at every K, and every head with every tree.

    A row is named after the head's folder, or after the whole path where two folders have the same name.
    """
    specs = [*heads, *also]
    if len(set(specs)) != len(specs):
        raise ConfigError(f"--heads and --also name a drafter twice: {', '.join(specs)}")
    if not ks or any(k < 1 for k in ks):
        raise ConfigError(f"-k: every K must be at least 1, got {', '.join(map(str, ks)) or 'none'}")
    short = [_short_name(spec) for spec in specs]
    labels = [name if short.count(name) == 1 else spec for name, spec in zip(short, specs, strict=True)]
    rows = [
        Method(f"{label} K={k}", spec, k)
        for label, spec in zip(labels, specs, strict=True)
        for k in dict.fromkeys(ks)
    ]
    rows += [
        Method(f"{label} tree {tree}", spec, tree.num_draft_tokens, tree)
        for label, spec in zip(labels, specs, strict=True)
        for tree in dict.fromkeys(trees if spec in heads else ())
    ]
    return [Method(PLAIN, None, 0), *rows]


def compare(
    target: "Target",
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: CompareOptions,
    *,
    advance: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Answer all prompts with all methods; `advance(method name)` is called after each batch.

    Raises ConfigError where plain decoding is not the first method or the target has no tokenizer.
    """
    if not methods or methods[0].spec is not None:
        raise ConfigError("plain decoding must be the first method: the others are compared with it")
    if target.tokenizer is None:
        raise ConfigError("comparing needs the target's tokenizer: load the target with tokenizer=True")
    engines = _engines(target, methods, prompts, options)
    samples: list[Sample] = []
    answers: dict[str, Answer] = {}
    begin = time.perf_counter()
    for lap in range(options.rounds):
        elapsed = time.perf_counter() - begin
        if lap and options.time_limit is not None and elapsed * (lap + 1) / lap > options.time_limit:
            break
        for ids, token_ids, replies in batches(target.tokenizer, prompts, options.batch, options.turns):
            for method in _rotated(methods, lap):
                sample, outputs = _measure(engines[method.name], method, lap, ids, token_ids, options)
                samples.append(sample)
                if method.name not in answers:
                    answers[method.name] = _answer(target.tokenizer, outputs[0])
                if method.spec is None:
                    replies.extend(output.outputs[0].text for output in outputs)
                advance(method.name)
    plain = [s for s in samples if s.method == PLAIN]
    results = [
        summarize(m.name, m.spec, m.num_draft_tokens, [s for s in samples if s.method == m.name], plain)
        for m in methods
    ]
    return Comparison(list(methods), samples, results, best_per_spec(results), prompts[0].turns[0], answers)


def build_engine(
    target: "Target",
    spec: str | None,
    num_draft_tokens: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    tree: TreeBudget | None = None,
    time_phases: bool = False,
) -> "LLM":
    """Return an engine whose cache just holds max_num_seqs conversations of max_model_len tokens."""
    from eyas.engine.llm import LLM

    return LLM(
        target,
        spec,
        num_draft_tokens=None if tree is not None else num_draft_tokens or None,
        tree=tree,
        max_model_len=min(max_model_len, target.config.max_position_embeddings),
        max_num_seqs=max_num_seqs,
        time_phases=time_phases,
    )


def _engines(
    target: "Target", methods: Sequence[Method], prompts: Sequence[Prompt], options: CompareOptions
) -> "dict[str, LLM]":
    """Return one warmed-up engine per method, each with a cache that just holds the longest conversation."""
    from eyas.core.sampling import SamplingParams

    longest = 0
    for prompt in prompts:
        talk = prompt.opening()
        talk += [{"role": "user", "content": text} for text in prompt.turns[: options.turns]]
        longest = max(longest, len(encode_chat(target.tokenizer, talk)))
    # Replies of earlier turns stand in later prompts; the margin is for the template's words around them.
    max_len = longest + options.turns * (options.max_tokens + 16)
    warmup = encode_chat(target.tokenizer, [{"role": "user", "content": prompts[0].turns[0]}])
    params = SamplingParams(temperature=options.temperature, max_tokens=WARMUP_TOKENS, seed=options.seed)
    engines = {}
    for method in methods:
        engines[method.name] = build_engine(
            target,
            method.spec,
            method.num_draft_tokens,
            tree=method.tree,
            max_model_len=max_len,
            max_num_seqs=options.batch,
            time_phases=True,
        )
        engines[method.name].warm_prefill(max_len)
        engines[method.name].generate([warmup] * options.batch, params)
    return engines


def _measure(
    engine: "LLM",
    method: Method,
    lap: int,
    ids: tuple[str, ...],
    token_ids: list[list[int]],
    options: CompareOptions,
) -> "tuple[Sample, list[RequestOutput]]":
    """Answer one batch, timed from the call to the last token on the host."""
    from eyas.core.sampling import SamplingParams

    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed)
    engine.stats.reset()
    begin = time.perf_counter()
    outputs = engine.generate(token_ids, params)
    seconds = time.perf_counter() - begin
    for name, output in zip(ids, outputs, strict=True):
        if output.error is not None:
            raise ConfigError(f"{method.name}: prompt {name} ended with an error: {output.error}")
    stats = engine.stats
    sample = Sample(
        method=method.name,
        round=lap,
        prompt_ids=ids,
        seconds=seconds,
        tokens=stats.committed,
        steps=stats.row_steps,
        accepted_by_depth=tuple(stats.accepted_by_depth),
        draft_steps=stats.drafted_row_steps,
        token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        verify_seconds=stats.verify_seconds,
        draft_seconds=stats.draft_seconds,
        overhead_seconds=stats.overhead_seconds,
        batch_steps=stats.steps,
    )
    return sample, outputs


def _answer(tokenizer: Any, output: "RequestOutput") -> Answer:
    completion = output.outputs[0]
    ids = completion.token_ids
    return Answer(completion.text, ids, completion.origins, token_pieces(tokenizer, ids))


def _short_name(spec: str) -> str:
    return f"small:{Path(spec[6:]).name}" if spec.startswith("small:") else Path(spec).name


def _rotated(methods: Sequence[Method], lap: int) -> list[Method]:
    """Return the methods in an order that starts one further each round."""
    shift = lap % len(methods)
    return [*methods[shift:], *methods[:shift]]
