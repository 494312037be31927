"""The engine from Python.

    llm = LLM("path/to/model", drafter="path/to/head", num_draft_tokens=5)
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=64))
    for output in llm.stream("Once upon a time", SamplingParams(temperature=0.7, seed=1)):
        print(output.outputs[0].text)
    print(llm.stats.acceptance_length)

Calls may be mixed: while one stream is read, every other running request moves on too. An LLM is not
thread-safe; a server drives it from one thread.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from eyas.core.errors import ConfigError, RequestError
from eyas.core.outputs import RequestOutput
from eyas.core.sampling import SamplingParams
from eyas.core.tree import TreeBudget
from eyas.drafters.base import Drafter
from eyas.engine.build import resolve_drafter, resolve_schedule, resolve_target
from eyas.engine.intake import Group, Intake, Prompt, context_limit
from eyas.engine.progress import capture_bar, progress_bar
from eyas.engine.request import Request
from eyas.engine.results import request_output
from eyas.engine.runner import Runner
from eyas.engine.stats import EngineStats
from eyas.targets.base import Target

MAX_NUM_SEQS = 16384
"""Each has a row in every state tensor, used or not."""

Progress = Callable[[int, int], None]
"""Called with (finished requests, output tokens so far)."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests (completions) that run and wait, and KV pages."""

    running: int
    waiting: int
    pages: int
    free_pages: int


class LLM:
    """A target, perhaps a drafter, and the engine around them.

    Args:
        model: path or name of a target, or a loaded Target.
        drafter: a head folder, "prompt_lookup", "small:PATH", a Drafter, or None for plain decoding.
        num_draft_tokens: K; None for what `eyas calibrate` found best at each batch size on this device
            (engine/calibrated.py), else for the kind's own default (drafters/build.py).
        sample_drafts: draw drafts from the drafter's distribution at the request's temperature and verify
            by the rejection rule; otherwise drafts are argmaxes, and a request gives the same tokens with
            and without a drafter.
        tree: draft trees instead of chains: a TreeBudget, or as text DEPTHxTOP_KxNODES such as "5x4x24";
            heads
            only. The tokens are those of chains and of plain decoding.
        dtype: of weights and caches; None for float32 on the CPU and bfloat16 on CUDA.
        device: None for CUDA if there is one.
        max_model_len: context limit, prompt and output; None for the target's own, at most 8192.
        max_num_seqs: requests that run at once; others wait.
        page_size: tokens a KV page; None for 16 on CUDA, 256 on the CPU.
        num_pages: KV pages; None for what memory allows.
        gpu_memory_fraction: share of the free GPU memory that the caches may take.
        prefill_chunk: prompt tokens of one request a step.
        prefill_budget: prompt tokens of all requests a step; None for prefill_chunk on the CPU, 16 times
            that on CUDA.
        admit_together: let newcomers wait until so many requests have ended: bulk work on a GPU gains from
            fewer, larger prefills (a sixteenth of max_num_seqs does well), a server keeps 1.
        enforce_eager: never use CUDA graphs.
        warm_graphs: capture the usual CUDA graphs now instead of each at its first use, of which
            engine/progress.watching_captures tells if it takes long.
        overlap: launch each step before the last one's tokens are read, so that the host's work hides behind
            the device's; the tokens are the same. None for CUDA only.
        prefix_caching: keep full pages of prompts and answers, the target's and the drafter's, for requests
            that begin alike; a page that is needed for something else goes, least recently used first.
        time_phases: time verification and drafting apart (`stats`); a CUDA step is two graphs then, so it is
            for measuring.
        seed: of the seeds that requests without one get.
    """

    def __init__(
        self,
        model: str | Path | Target,
        drafter: str | Path | Drafter | None = None,
        *,
        num_draft_tokens: int | None = None,
        sample_drafts: bool = False,
        tree: TreeBudget | str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        page_size: int | None = None,
        num_pages: int | None = None,
        gpu_memory_fraction: float = 0.85,
        prefill_chunk: int = 512,
        prefill_budget: int | None = None,
        admit_together: int = 1,
        enforce_eager: bool = False,
        warm_graphs: bool = False,
        overlap: bool | None = None,
        prefix_caching: bool = False,
        time_phases: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("num_draft_tokens", num_draft_tokens),
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("page_size", page_size),
            ("num_pages", num_pages),
            ("prefill_chunk", prefill_chunk),
            ("prefill_budget", prefill_budget),
            ("admit_together", admit_together),
            ("seed", seed),
        ):
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise ConfigError(f"{name}={value!r} must be a whole number")
        if seed is None:
            raise ConfigError("seed=None must be a whole number")
        if not isinstance(tree, str | TreeBudget | None):
            raise ConfigError(f"tree={tree!r} must be a TreeBudget or text such as '5x4x24'")
        if not isinstance(gpu_memory_fraction, int | float):
            raise ConfigError(f"gpu_memory_fraction={gpu_memory_fraction!r} must be a number")
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("prefill_chunk", prefill_chunk),
            ("admit_together", admit_together),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs}: at most {MAX_NUM_SEQS}; others wait in the queue"
            )
        if prefill_budget is not None and prefill_budget < 1:
            raise ConfigError(f"prefill_budget={prefill_budget} must be at least 1, or None")
        if not 0.0 < gpu_memory_fraction <= 1.0:
            raise ConfigError(f"gpu_memory_fraction={gpu_memory_fraction} must be in (0, 1]")
        self.target = resolve_target(model, dtype=dtype, device=device)
        budget = TreeBudget.parse(tree) if isinstance(tree, str) else tree
        schedule = None
        if num_draft_tokens is None and budget is None:
            schedule = resolve_schedule(drafter, self.target, max_num_seqs, sample_drafts=sample_drafts)
        if schedule is not None:
            num_draft_tokens = schedule.longest_chain or None
            drafter = drafter if schedule.most else None
        self.drafter = resolve_drafter(
            drafter,
            self.target,
            num_draft_tokens=num_draft_tokens,
            sample_drafts=sample_drafts,
            tree=budget,
            trees=() if schedule is None else schedule.trees,
        )
        max_len = context_limit(max_model_len, self.target.config.max_position_embeddings)
        if prefill_budget is None:
            prefill_budget = prefill_chunk * (16 if self.target.device.type == "cuda" else 1)
        eos_ids = _end_of_text_ids(self.target)
        self._runner = Runner(
            self.target,
            self.drafter,
            max_len=max_len,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            num_pages=num_pages,
            gpu_memory_fraction=gpu_memory_fraction,
            prefill_chunk=prefill_chunk,
            prefill_budget=max(prefill_budget, prefill_chunk),
            admit_together=admit_together,
            eos_token_ids=eos_ids,
            enforce_eager=enforce_eager,
            overlap=self.target.device.type == "cuda" if overlap is None else overlap,
            prefix_caching=prefix_caching,
            time_phases=time_phases,
            schedule=schedule,
        )
        self._intake = Intake(
            tokenizer=self.target.tokenizer,
            vocab_size=self.target.config.vocab_size,
            max_len=max_len,
            num_draft_tokens=0 if self.drafter is None else self.drafter.tree.depth,
            eos_token_ids=eos_ids,
            seed=seed,
        )
        self._live: dict[str, Group] = {}
        self.max_num_seqs = max_num_seqs
        if warm_graphs:
            with capture_bar() as report:
                self._runner.warm(report)

    @property
    def num_draft_tokens(self) -> int:
        """K; nodes of a tree; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.num_draft_tokens

    @property
    def max_model_len(self) -> int:
        """The context limit."""
        return self._runner.state.max_len

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.target.tokenizer

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, or since `stats.reset()`."""
        return self._runner.stats

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts (text, token ids, or lists of either); one RequestOutput each, in their order.

        RequestError if any prompt or parameter is wrong, before anything runs. A failure of one request
        while it runs ends that request alone, with finish_reason "error" and `error` set.
        """
        listed = _as_list(prompts)
        groups = self._intake.groups(listed, params if params is not None else SamplingParams())
        with progress_bar(len(groups), enabled=progress) as report:
            self._run(groups, report)
        return [self._output(group) for group in groups]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_options: dict[str, Any] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the target's chat template."""
        if not messages:
            raise RequestError("messages is empty: at least one message is needed")
        if not isinstance(messages, Sequence):
            raise RequestError("messages must be a list of messages, or a list of such lists")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], dict) else messages
        prompts = [self._intake.chat_ids(one, template_options=template_options) for one in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield its cumulative state whenever tokens were committed.

        A wrong request raises at once. Closing the iterator aborts the request and frees its pages.
        """
        group = self._intake.group(prompt, params if params is not None else SamplingParams(), text=True)
        return self._stream(group)

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Output token ids of many prompts, without text; the cheapest way through the engine.

        A stop token that ended an output is its last id. A request that fails gives what it had.
        `progress` is called after every step in which a request ended.
        """
        groups = self._intake.groups(prompts, params)
        if any(group.params.n > 1 for group in groups):
            raise RequestError("generate_ids gives one output a prompt: n must be 1")
        self._run(groups, progress)
        return [group.requests[0].output_ids for group in groups]

    def iterate_ids(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[int], str]]:
        """As generate_ids, but yields (index of the prompt, output ids, finish reason) as requests end.

        Closing the iterator aborts the requests that still run.
        """
        groups = self._intake.groups(prompts, params)
        if any(group.params.n > 1 for group in groups):
            raise RequestError("iterate_ids gives one output a prompt: n must be 1")
        places = {id(group.requests[0]): index for index, group in enumerate(groups)}
        try:
            self._submit(groups)
            while places:
                ended = self._runner.step()
                if self._runner.scheduler.idle:
                    # The last ones may have ended in somebody else's step, between two of our yields.
                    ended = [group.requests[0] for group in groups]
                for request in ended:
                    index = places.pop(id(request), None)
                    if index is not None:
                        yield index, request.output_ids, request.finish_reason or "error"
        finally:
            for group in groups:
                self.abort(group.request_id)

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages; False if no such request is running or waiting."""
        group = self._live.pop(request_id, None)
        if group is None:
            return False
        for request in group.requests:
            self._abort(request)
        return True

    def new_intake(self) -> Intake:
        """An intake with seeds of its own, from which groups for `submit` come; another thread may use it."""
        own = self._intake
        return Intake(
            tokenizer=own.tokenizer,
            vocab_size=own.vocab_size,
            max_len=own.max_len,
            num_draft_tokens=own.num_draft_tokens,
            eos_token_ids=own.eos_token_ids,
            grammars=own.grammars,
            seed=secrets.randbits(64),
        )

    def submit(self, group: Group) -> None:
        """Queue a group that an intake of this LLM made; `step` moves it on, `abort` ends it early.

        Its request_id must be its own among all that are live.
        """
        if group.request_id in self._live:
            raise RequestError(f"request_id={group.request_id!r} is in use")
        self._submit([group])

    def step(self) -> bool:
        """Move every submitted request on by one step and forget those that ended; False once all have."""
        self._runner.step()
        for request_id in [key for key, group in self._live.items() if group.finished]:
            del self._live[request_id]
        return not self._runner.scheduler.idle

    def warm_prefill(self, context: int) -> None:
        """Capture the CUDA graphs of prefill now, for prompts of up to so many tokens.

        How many prompts come together is chance; a measurement should not meet a first use.
        """
        self._runner.warm_prefill(context)

    def load(self) -> EngineLoad:
        """How busy the engine is now."""
        scheduler = self._runner.scheduler
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            # Page 0 is scratch and belongs to nobody.
            pages=scheduler.blocks.num_pages - 1,
            free_pages=scheduler.blocks.num_free,
        )

    def _output(self, group: Group) -> RequestOutput:
        decode = None if self.tokenizer is None else self._intake.decoder(group.params)
        return request_output(group, decode)

    def _submit(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._live[group.request_id] = group
            for request in group.requests:
                self._runner.scheduler.add(request)

    def _run(self, groups: Sequence[Group], progress: Progress | None) -> None:
        """Step until all of these have ended; leave nothing behind if that is interrupted."""
        mine = {id(request) for group in groups for request in group.requests}
        total, before = len(mine), self.stats.committed
        try:
            self._submit(groups)
            # A callback may abort requests, which no step reports: idle means that all have ended.
            while mine and not self._runner.scheduler.idle:
                ended = self._runner.step()
                mine.difference_update(map(id, ended))
                if progress is not None and ended:
                    progress(total - len(mine), self.stats.committed - before)
        finally:
            for group in groups:
                self.abort(group.request_id)

    def _stream(self, group: Group) -> Iterator[RequestOutput]:
        try:
            self._submit([group])
            seen = 0
            while True:
                # Somebody else's steps may have ended it meanwhile.
                if not group.finished:
                    self._runner.step()
                size = sum(len(request.output_ids) for request in group.requests)
                finished = group.finished
                if finished or size != seen:
                    seen = size
                    yield self._output(group)
                if finished:
                    return
        finally:
            self.abort(group.request_id)

    def _abort(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._runner.release(request)


def _as_list(prompts: str | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whatever single prompt or sequence was given."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed = list(prompts)
    except TypeError:
        raise RequestError(f"prompts must be a text, token ids or a list of them, got {prompts!r}") from None
    if listed and isinstance(listed[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return listed


def _end_of_text_ids(target: Target) -> list[int]:
    """The target's end-of-text ids and its tokenizer's."""
    ids = set(target.config.eos_token_ids)
    own = getattr(target.tokenizer, "eos_token_id", None)
    if own is not None:
        ids.add(int(own))
    return sorted(ids)
