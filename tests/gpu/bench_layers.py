"""Attention plans and norms among their neighbours: decoder layers of a step in a CUDA graph.

    python tests/gpu/bench_layers.py --seconds 60

A kernel by itself says little about one whose start overlaps the kernel before. So this times whole layers
(norm, qkv, attention, fold, o, norm, gate and up, down) with late launches: as they are, and with one thing
changed. Prints a JSON line per shape and batch as it goes: microseconds a layer, median of the replays, and
whether the last layer's output has the bits of the first variant. Other processes
compile first, all at once; no line is begun after --seconds.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from triton.runtime.jit import JITFunction

from eyas.core.batch import KVLayout
from eyas.kernels.settings import use_pdl
from eyas.kernels.triton import paged_attention_plan as plans
from eyas.kernels.triton import pdl
from eyas.kernels.triton.paged_attention_plan import CHUNK, Plan
from eyas.nn.norm import Stream
from eyas.nn.paged import PagedContext, allocate_cache, uniform_batch
from eyas.nn.random_weights import fill
from eyas.nn.rotary import Rotary
from eyas.targets.decoder import DecoderLayer
from eyas.targets.shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parent))
from bench_linear import timed

PAGE, CONTEXT, BOUND, ROWS = 16, 1088, 2048, 8
UNIT = plans.unit(torch.bfloat16)
CASES = [("llama-3.1-8b", 8, 8), ("smollm2-135m", 64, 30), ("llama-3.1-8b", 64, 8)]
CASES += [("llama-3.1-8b", 1, 8), ("smollm2-135m", 1, 30), ("smollm2-135m", 8, 30)]
"""Shape, requests, layers."""


@dataclass(frozen=True)
class Variant:
    """What is changed."""

    plan: Plan | None = None
    """None for the plan in use."""
    small_early: bool = False
    """Whether small kernels let the next one in at once; nobody asks for weights."""

    def __str__(self) -> str:
        names = {0: "walk", UNIT: "unit", CHUNK: "chunk"}
        said = []
        if self.plan is not None:
            plan = self.plan
            said += [names[plan.state], f"x{plan.splits}", f"st{plan.stages}"]
        said += ["small early"] if self.small_early else []
        return " ".join(said) or "in use"


def small_early(*, small: bool, own: bool = True) -> dict[str, int | bool]:
    """As pdl.options, late, but for small kernels."""
    del own
    when = pdl.EARLY if small else pdl.LATE
    return {"PDL": when.value, "launch_pdl": True}


@contextmanager
def using(variant: Variant) -> Iterator[None]:
    before = plans.choose, pdl.options
    try:
        with ExitStack() as stack:
            stack.enter_context(use_pdl("late"))
            if variant.plan is not None:
                plans.choose = lambda *_: variant.plan
            if variant.small_early:
                pdl.options = small_early
            yield
    finally:
        plans.choose, pdl.options = before


def base_plan(shape: str, batch: int, bound: int = BOUND) -> Plan:
    config = SHAPES[shape]
    pairs = ROWS * config.num_heads // config.num_kv_heads
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    kind = torch.bfloat16, config.head_dim, processors
    return plans.choose(batch, config.num_kv_heads, pairs, bound, *kind)


def variants(shape: str, batch: int) -> list[Variant]:
    """The plan in use first."""
    base, kv_heads = base_plan(shape, batch), SHAPES[shape].num_kv_heads
    tiles, units, chunks = batch * kv_heads, BOUND // UNIT, BOUND // CHUNK
    tried = [Variant(), Variant(small_early=True)]
    tried += [Variant(replace(base, stages=2))] if base.stages > 2 else []
    if tiles * units <= 1100:
        tried += [Variant(replace(base, state=UNIT, splits=units, stages=2))]
    if 20 < tiles < 300:
        few = min(chunks, max(264 // tiles, 1) + 1)
        tried += [Variant(replace(base, state=CHUNK, splits=few, stages=3))]
    return tried


class Layers(nn.Module):
    """`count` decoder layers over the rows of a verification, each with its own cache."""

    def __init__(self, shape: str, batch: int, count: int) -> None:
        super().__init__()
        config = SHAPES[shape]
        with torch.device("meta"):
            self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(count))
        fill(self.layers, device="cuda", dtype=torch.bfloat16, std=0.02, seed=0)
        pages = BOUND // PAGE
        layout = KVLayout(count, config.num_kv_heads, config.head_dim)
        cache = allocate_cache(layout, batch * pages + 1, PAGE, dtype=torch.bfloat16, device="cuda")
        for x in (*cache.keys, *cache.values):
            x.normal_()
        order = torch.randperm(batch * pages, device="cuda") + 1
        start = torch.full((batch,), CONTEXT - ROWS, device="cuda")
        forward = uniform_batch(
            token_ids=torch.zeros(batch, ROWS, dtype=torch.int64, device="cuda"),
            start=start,
            counts=torch.full_like(start, ROWS),
            page_table=order.view(batch, pages).int(),
            page_size=PAGE,
            max_position=BOUND,
            max_visible=BOUND,
        )
        self.context = PagedContext(cache, forward)
        self.x = torch.randn(batch * ROWS, config.hidden_size, device="cuda").bfloat16()
        rotary = Rotary(config.rope, config.head_dim, BOUND).to("cuda")
        self.angles = rotary(forward.positions)

    def forward(self) -> torch.Tensor:
        stream = Stream(self.x)
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), None]
        for layer, after in zip(self.layers, norms, strict=True):
            stream = layer(stream, *self.angles, self.context, after)
        return stream.hidden


def compile_one(shape: str, batch: int, variant: Variant) -> None:
    """In another process: compile the kernels of a layer into Triton's cache and launch nothing."""
    run = JITFunction.run
    try:
        with torch.no_grad():
            layers = Layers(shape, batch, 1)
            JITFunction.run = lambda *given, **options: run(*given, **options | {"warmup": True})
            with using(variant):
                layers()
    finally:
        JITFunction.run = run


def measure(shape: str, batch: int, count: int) -> dict[str, object]:
    layers = Layers(shape, batch, count)
    figures: dict[str, float] = {}
    errors: dict[str, str] = {}
    first: torch.Tensor | None = None
    layers()
    for variant in variants(shape, batch):
        try:
            with using(variant):
                out = layers()
                torch.cuda.synchronize()
                figures[str(variant)] = round(timed(lambda _: layers(), 1, replays=15) / count, 3)
        except Exception as error:  # noqa: BLE001 - the other variants are worth having
            errors[str(variant)] = f"{type(error).__name__}: {error}"[:300]
            if "CUDA" in str(error):
                break
            continue
        first = out if first is None else first
        if not torch.equal(first, out):
            errors[str(variant)] = "other bits"
    record: dict[str, object] = {"shape": shape, "batch": batch, "layers": count}
    record |= {"us_a_layer": dict(sorted(figures.items(), key=lambda item: item[1]))}
    return record | {"errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="no further line is begun after this")
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases, in order")
    options = parser.parse_args()
    begin, cases = time.time(), CASES[: options.cases]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), torch.set_num_threads, initargs=(1,)
    )
    jobs = {
        (shape, batch): [
            pool.submit(compile_one, shape, batch, variant) for variant in variants(shape, batch)
        ]
        for shape, batch, _ in cases
    }
    with torch.no_grad():
        for shape, batch, count in cases:
            if time.time() - begin > options.seconds:
                break
            failed = [str(job.exception())[:200] for job in jobs[shape, batch] if job.exception()]
            record = measure(shape, batch, count)
            record |= {"not_compiled": failed} if failed else {}
            print(json.dumps(record | {"seconds": round(time.time() - begin, 1)}), flush=True)
            torch.cuda.empty_cache()
    pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
