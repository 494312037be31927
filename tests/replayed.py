"""Graphs of steps and prefill on the CPU: all but recording and replay, which run the function again."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eyas.engine.graphs import Mark, StepGraphs
from eyas.engine.llm import LLM
from eyas.engine.prefill_graphs import PrefillGraphs
from eyas.engine.recorder import Recorder
from eyas.engine.sampler import Logprobs
from eyas.engine.step import Report, Variant


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested tuples and dataclasses, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


class Replay:
    """Runs a function again and writes what it gives into the tensors that it gave first."""

    def __init__(self, function: Callable[[], Any], outputs: Any) -> None:
        self.function, self.outputs = function, outputs
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for static, fresh in zip(tensors_of(self.outputs), tensors_of(self.function()), strict=True):
            static.copy_(fresh)


class ReplayedSteps(StepGraphs):
    """Buckets, padding, variants, static inputs and outputs as on CUDA."""

    def run(self, batch: tuple[int, ...], variant: Variant, mark: Mark) -> Report:
        # The copy to the host, which on CUDA stands in the stream before the next replay.
        report = super().run(batch, variant, mark)
        logprobs = report.logprobs
        return Report(
            report.rows.clone(), None if logprobs is None else Logprobs(*[one.clone() for one in logprobs])
        )


class ReplayedRecorder(Recorder):
    """Runs functions where they would be captured."""

    def rehearse(self, function: Callable[[], object]) -> None:
        for _ in range(2):
            function()

    def record(self, function: Callable[[], Any]) -> Any:
        outputs = function()
        return outputs, Replay(function, outputs)


def with_graphs(llm: LLM, *, by_phase: bool = False) -> None:
    """Have an LLM's steps replayed."""
    runner = llm._runner
    runner._graphs = runner._launcher.graphs = ReplayedSteps(
        runner.models, runner.state, ReplayedRecorder(), by_phase=by_phase
    )


def with_prefill_graphs(llm: LLM, *, rows: int, most_blocks: int = 8) -> PrefillGraphs:
    """Have an LLM's prefill replayed, in blocks of so many rows."""
    runner = llm._runner
    runner._prefills = PrefillGraphs(
        runner.models, runner.state, ReplayedRecorder(), rows=rows, most_blocks=most_blocks
    )
    return runner._prefills
