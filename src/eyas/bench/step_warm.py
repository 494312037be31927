"""Kernels compiled by several processes at once, before they are timed by one.

A step has some fifty kernels, and a process compiles one after another; what was compiled lies in Triton's
cache, which all processes share. Every job does what is timed, once, over a target of a few layers: layers
run the same kernels, so that a job needs little memory and no time but the compiler's.
"""

import multiprocessing
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from eyas.bench.step_method import Method, StepOptions
from eyas.bench.step_models import open_drafter, open_target
from eyas.core.tree import TreeBudget
from eyas.drafters import shapes as heads
from eyas.targets import shapes
from eyas.targets.base import Target

NUM_LAYERS = 6
"""The fewest whose three captured layers are those of EAGLE-3."""


@dataclass(frozen=True, slots=True)
class Job:
    """One method at one batch size."""

    target: str
    drafter: str
    """"" for none"""
    batch: int
    options: StepOptions
    device: str
    dtype: torch.dtype | None

    def __str__(self) -> str:
        return f"{self.target} {self.drafter or 'plain'} batch {self.batch} pdl {self.options.pdl}"


def jobs_of(
    target: str,
    drafters: Sequence[str],
    options: StepOptions,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> list[Job]:
    """Everything that `bench_step` is about to time, the largest batch first."""
    ways = [options]
    if options.both:
        ways += [replace(options, invariant=not options.invariant)]
    return [
        Job(target, drafter, batch, way, str(device), dtype)
        for batch in sorted(options.batch_sizes, reverse=True)
        for drafter in (*reversed(drafters), "")
        for way in ways
    ]


def warm(jobs: Iterable[Job], processes: int) -> dict[str, Any]:
    """Run the jobs; say how many processes and seconds it took, and what failed: nothing depends on it."""
    begin, failed = time.perf_counter(), []
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    with pool:
        futures = {pool.submit(run, job): job for job in jobs}
        for future, job in futures.items():
            error = future.exception()
            if error is not None:
                failed.append(f"{job}: {type(error).__name__}: {error}"[:300])
    return {"processes": processes, "seconds": time.perf_counter() - begin, "failed": failed}


def run(job: Job) -> None:
    """Do once what is timed."""
    target = _target(job.target, job.device, job.dtype, thin=not job.drafter or heads.is_shape(job.drafter))
    options = job.options
    tree = TreeBudget.parse(options.tree) if options.tree else None
    k = None if tree is not None else options.num_draft_tokens
    make = partial(open_drafter(job.drafter, target).make, k, tree) if job.drafter else lambda: None
    with options.kernels():
        Method(target, make, job.batch, options).round(keep=False)


@lru_cache(maxsize=1)
def _target(spec: str, device: str, dtype: torch.dtype | None, *, thin: bool) -> Target:
    """The target, with few layers where only its shape counts."""
    if thin and shapes.is_shape(spec):
        config = shapes.shape_config(spec)
        few = f"{spec.removeprefix(shapes.PREFIX)} of few layers"
        shapes.SHAPES[few] = replace(config, num_layers=min(NUM_LAYERS, config.num_layers))
        spec = shapes.PREFIX + few
    return open_target(spec, device=device, dtype=dtype)
