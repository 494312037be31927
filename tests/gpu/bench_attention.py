"""Micro-benchmark of decode attention against reading the keys and values, and against torch's.

    python tests/gpu/bench_attention.py --seconds 40           the plans in use, with PDL, other cases
    python tests/gpu/bench_attention.py --model 8b             one model
    python tests/gpu/bench_attention.py --tune --seconds 90    the same, then other plans, best first
    python tests/gpu/bench_attention.py --step --seconds 60    a step's cases, other plans too

Prints a JSON line per case as it goes, the most important first: 135m and 8b at context 1024. Kernels are
compiled by other processes, all at once, in the order of the lines; no line is begun after --seconds, which
count the compilers in.

Every figure is the microseconds of one layer among many in a CUDA graph, over caches that together do not fit
in the L2 cache; median of the replays. It starts from qkv as projected: rotation, cache write and attention.
torch's attention reads keys and values that are contiguous and rotated already, and writes none. `bits` says
whether the last row is bit for bit what a program that walks all keys gives for it alone.
--step has the step's bound, a context that does not end with a chunk, and the time without the fold.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import functional
from triton.runtime.jit import JITFunction

from eyas.kernels.reference.rows import Rows, chain_rows
from eyas.kernels.settings import PDL, Pdl, use_pdl
from eyas.kernels.triton import paged_attention as kernels
from eyas.kernels.triton import paged_attention_plan as plans
from eyas.kernels.triton.paged_attention_plan import CHUNK, Plan

sys.path.insert(0, str(Path(__file__).parent))
from bench_linear import READ_BYTES_A_SECOND, ROTATED_BYTES, timed

PAGE = 16
MODELS = {"8b": (32, 8, 128), "135m": (9, 3, 64), "0.5b": (14, 2, 64)}
UNIT = plans.unit(torch.bfloat16)
CHOOSE = plans.choose
Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """`rows` new rows of each of `batch` requests with `context` keys each, the new ones included."""

    model: str
    batch: int
    rows: int
    context: int
    bound: int | None = None
    """Keys that the launch is sized for; None for the context."""

    @property
    def pairs(self) -> int:
        heads, kv_heads, _ = MODELS[self.model]
        return self.rows * heads // kv_heads

    @property
    def keys(self) -> int:
        return self.bound or self.context

    def plan(self) -> Plan:
        _, kv_heads, head_dim = MODELS[self.model]
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        return CHOOSE(self.batch, kv_heads, self.pairs, self.keys, torch.bfloat16, head_dim, processors)


FIRST = [
    Case(model, batch, rows, 1024) for model in ("135m", "8b") for batch in (1, 8, 64) for rows in (1, 8)
]
LONG = [("8b", 8, 4096), ("8b", 1, 4096), ("0.5b", 1, 1024), ("0.5b", 64, 1024)]
CASES = FIRST + [Case(model, batch, rows, context) for model, batch, context in LONG for rows in (1, 8)]
CASES += [Case("8b", 64, 1, 4096), Case("135m", 1, 62, 1024), Case("8b", 1, 62, 1024)]
CASES += [Case("8b", 1, 2048, 2048), Case("135m", 1, 2048, 2048), Case("8b", 1, 2048, 8192)]
# Verification, draft and plain decoding of a step whose requests have some 1,024 keys.
STEP = [
    Case(model, batch, rows, 1088, 2048) for rows in (8, 14, 1) for model, batch in (("8b", 8), ("135m", 64))
]
STEP += [Case(model, batch, rows, 1088, 2048) for rows in (8, 1) for model, batch in (("8b", 1), ("8b", 64))]
STEP += [Case("135m", 1, 8, 1088, 2048), Case("135m", 8, 8, 1088, 2048), Case("8b", 1, 1024, 1024)]


class Bench:
    """Tensors of all cases of a model, batch and context; the last row is the same for any number of rows."""

    def __init__(
        self, model: str, batch: int, context: int, most_rows: int, copies: int | None = None
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = MODELS[model]
        self.context = context
        pages = context // PAGE
        self.kv_bytes = 2 * batch * context * self.kv_heads * self.head_dim * 2
        self.copies = copies or min(max(int(ROTATED_BYTES // self.kv_bytes) + 1, 2), 40)
        shape = (self.copies, batch * pages + 1, PAGE, self.kv_heads, self.head_dim)
        self.keys, self.values = (self.normal(shape) for _ in range(2))
        table = torch.randperm(batch * pages, device="cuda") + 1
        # Wider than the context, as a page table for longer requests is.
        self.table = functional.pad(table.view(batch, pages).int(), (0, 3 * pages))
        self.width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = self.normal((batch, most_rows, self.width))
        self.angles = torch.rand(2, batch, most_rows, self.head_dim // 2, device="cuda")
        self.alone: torch.Tensor | None = None
        self.filled = False

    def prepare(self, plan: Plan) -> None:
        """Cache all rows, so that fewer rows find the others before them; keep what the last gives alone."""
        name = kind(plan, pdl="off")
        if not self.filled:
            checked(partial(self.forced(self.call(self.qkv.shape[1]), plan), 0), name)
            self.filled = True
        if self.alone is None:
            alone = checked(partial(self.forced(self.call(1), plan), 0), name)
            self.alone = alone.view(len(self.table), self.heads, self.head_dim)

    @staticmethod
    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def call(self, rows: int, max_visible: int | None = None) -> Callable[[int], torch.Tensor]:
        """The last `rows` rows of every request, as a function of the layer."""
        batch = len(self.table)
        start = torch.full((batch,), self.context - rows, device="cuda")
        counts = torch.full_like(start, rows)
        fields: Rows = chain_rows(start, counts, self.table, rows, PAGE, self.context)
        qkv = self.qkv[:, -rows:].reshape(-1, self.width)
        cos, sin = (x[:, -rows:].reshape(batch * rows, -1).contiguous() for x in self.angles)

        def call(layer: int) -> torch.Tensor:
            layer %= self.copies
            return kernels.rotated_attention(
                qkv,
                cos,
                sin,
                self.keys[layer],
                self.values[layer],
                fields.slots,
                self.table,
                fields.q_start,
                fields.visible,
                num_heads=self.heads,
                scale=self.head_dim**-0.5,
                max_rows=rows,
                max_visible=max_visible or self.context,
            )

        return call

    @staticmethod
    def forced(call: Callable[[int], torch.Tensor], plan: Plan) -> Callable[[int], torch.Tensor]:
        """The same call by this plan."""

        def by_plan(layer: int) -> torch.Tensor:
            plans.choose = lambda *_: plan
            try:
                return call(layer)
            finally:
                plans.choose = CHOOSE

        return by_plan

    def agrees(self, out: torch.Tensor) -> bool:
        """Whether the last row of every request has the bits that it has alone."""
        last = out.view(len(self.table), -1, self.heads, self.head_dim)[:, -1]
        return self.alone is not None and torch.equal(last, self.alone)

    def torchs(self, rows: int) -> Callable[[int], torch.Tensor]:
        """SDPA of the same rows; a full context for few rows, causal for a whole prompt."""
        batch = len(self.table)
        queries = self.normal((batch, self.heads, rows, self.head_dim))
        shape = (self.copies, batch, self.kv_heads, self.context, self.head_dim)
        keys, values = (self.normal(shape) for _ in range(2))
        causal = rows == self.context

        def call(layer: int) -> torch.Tensor:
            layer %= self.copies
            return functional.scaled_dot_product_attention(
                queries, keys[layer], values[layer], is_causal=causal, enable_gqa=True
            )

        return call


WALK = Plan(block_m=32, state=0, splits=1, warps=4, stages=2)


MOST_ROWS = 16
"""Rows that every request of a case up to so many has at hand."""


@lru_cache(maxsize=1)
def bench_of(model: str, batch: int, context: int, most_rows: int, copies: int | None = None) -> Bench:
    return Bench(model, batch, context, most_rows, copies)


def candidates(case: Case) -> list[Plan]:
    """Plans worth a try, the table's first."""
    base = case.plan()
    block_m = 16 if case.pairs <= 16 else 32
    _, kv_heads, _ = MODELS[case.model]
    tiles = case.batch * kv_heads * -(-case.pairs // block_m)
    units, chunks = -(-case.context // UNIT), -(-case.context // CHUNK)
    tried = [base]
    if tiles * units <= 6000 and case.rows <= 64:
        tried += [Plan(block_m, UNIT, units, 4, stages) for stages in (2, 3)]
    if tiles * units > 200 and case.rows <= 64:
        for splits in dict.fromkeys((chunks, max(chunks // 2, 1))):
            tried += [Plan(block_m, CHUNK, splits, 4, stages) for stages in (2, 3)]
    if tiles > 100:
        tried += [Plan(block_m, 0, 1, 4, stages) for stages in (2, 3, 4)]
    if case.pairs > 32:
        tried += [replace(base, block_m=16), replace(base, block_m=64)]
    return list(dict.fromkeys(tried))


def kind(plan: Plan, *, pdl: Pdl) -> str:
    """What decides whether a plan's kernel can fault: all but the number of splits."""
    return short(replace(plan, splits=0)) + ("" if pdl == "off" else f" {pdl}")


def short(plan: Plan) -> str:
    """Form for a key: unit, chunk or walk, tile's pairs, splits, warps, stages."""
    kind = {UNIT: "unit", CHUNK: "chunk", 0: "walk"}[plan.state]
    return f"{kind} m{plan.block_m} x{plan.splits} w{plan.warps} st{plan.stages}"


def compile_one(model: str, rows: int, plan: Plan, *, pdl: Pdl) -> None:
    """In another process: compile the kernels of a call into Triton's cache and launch nothing."""
    run = JITFunction.run
    JITFunction.run = lambda *given, **options: run(*given, **options | {"warmup": True})
    # Nor fill the caches, while the first lines are timed.
    Bench.normal = staticmethod(partial(torch.empty, device="cuda", dtype=torch.bfloat16))
    try:
        with torch.no_grad(), use_pdl(pdl):
            bench = bench_of(model, 1, max(rows, 1024), max(rows, MOST_ROWS), 1)
            bench.forced(bench.call(rows), plan)(0)
    finally:
        JITFunction.run = run


class FaultError(Exception):
    """The kernel of a plan has broken this process' CUDA context."""


def checked(call: Callable[[], Result], name: str) -> Result:
    """What call() returns, waited for, so that a fault is blamed on the plan that has it."""
    try:
        out = call()
        torch.cuda.synchronize()
    except Exception as error:
        if "CUDA" in str(error):
            raise FaultError(name) from error
        raise
    return out


@dataclass(frozen=True)
class Line:
    """What is timed together."""

    case: Case
    tried: tuple[Plan, ...]
    pdl: tuple[Pdl, ...]
    extras: bool = False

    def jobs(self) -> dict[tuple[str, int, str], Callable[[], None]]:
        """What to compile for it, by what tells kernels apart; the number of requests and of keys doesn't."""
        rows = self.case.rows
        needed: list[tuple[int, Plan, Pdl]] = [(max(rows, MOST_ROWS), WALK, "off"), (1, WALK, "off")]
        needed += [(rows, plan, pdl) for pdl in self.pdl for plan in self.tried]
        return {
            (self.case.model, rows, kind(plan, pdl=pdl)): partial(
                compile_one, self.case.model, rows, plan, pdl=pdl
            )
            for rows, plan, pdl in needed
        }


def lines_of(model: str | None, *, tune: bool, extras: bool, of_step: bool) -> list[Line]:
    """The plans in use for the first cases, without PDL, then with it; for the others; then other plans."""
    if of_step:
        return [
            Line(case, tuple(candidates(case)), ("late",)) for case in STEP if model in (None, case.model)
        ]
    cases = [case for case in CASES if model in (None, case.model)]
    lines = [Line(case, (case.plan(),), (pdl,)) for pdl in PDL for case in cases if case in FIRST]
    lines += [Line(case, (case.plan(),), PDL) for case in cases if case not in FIRST]
    lines += [Line(case, (case.plan(),), ("off",), extras=True) for case in cases if extras]
    lines += [Line(case, tuple(candidates(case)), ("off", "auto")) for case in cases if tune]
    return lines


def without_fold(call: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """The same call, whose states nobody folds: what the second kernel costs."""

    class Nothing:
        def __getitem__(self, _: object) -> Callable[..., None]:
            return lambda *_, **__: None

    def half(layer: int) -> torch.Tensor:
        fold, kernels.kernels.fold_kernel = kernels.kernels.fold_kernel, Nothing()
        try:
            return call(layer)
        finally:
            kernels.kernels.fold_kernel = fold

    return half


def measure(line: Line, bad: list[str]) -> dict[str, object]:
    """Time every plan of a line and compare its bits; `bad` plans are left out."""
    case, tried = line.case, line.tried
    bench = bench_of(case.model, case.batch, case.context, max(case.rows, MOST_ROWS))
    bench.prepare(next(plan for plan in (WALK, *tried) if kind(plan, pdl="off") not in bad))
    launches = min(max(bench.copies, 10), 40)
    rows_bytes = 2 * case.batch * case.rows * bench.width * 2
    floor = (bench.kv_bytes + rows_bytes) / READ_BYTES_A_SECOND * 1e6
    call = bench.call(case.rows, case.keys)
    figures: dict[str, float] = {}
    errors: dict[str, str] = {}
    for pdl in line.pdl:
        for plan in tried:
            name = short(plan) + ("" if pdl == "off" else f" {pdl}")
            if kind(plan, pdl=pdl) in bad:
                errors[name] = "faults"
                continue
            forced = bench.forced(call, plan)
            with use_pdl(pdl):
                out = checked(partial(forced, 0), kind(plan, pdl=pdl))
                same = bench.agrees(out)
                figures[name] = round(checked(partial(timed, forced, launches), kind(plan, pdl=pdl)), 2)
            if not same:
                errors[name] = "other bits"
    base = short(tried[0])
    record: dict[str, object] = {**asdict(case), "plan": base, "floor_us": round(floor, 2)}
    if "off" in line.pdl:
        record |= {"us": figures.get(base), "torch_us": round(timed(bench.torchs(case.rows), launches), 2)}
    record |= {f"{pdl}_us": figures.get(f"{base} {pdl}") for pdl in line.pdl if pdl != "off"}
    if case.bound:
        best = min(
            (plan for plan in tried if short(plan) + " late" in figures),
            key=lambda plan: figures[short(plan) + " late"],
        )
        with use_pdl("late"):
            record["best"], record["without_fold_us"] = (
                short(best),
                {
                    short(plan): round(timed(without_fold(bench.forced(call, plan)), launches), 2)
                    for plan in dict.fromkeys((tried[0], best))
                    if plan.state
                },
            )
    if line.extras:
        kernels.FUSE_ROTATION = False
        record["apart_us"] = round(timed(call, launches), 2)
        kernels.FUSE_ROTATION, kernels.PREFETCH = True, False
        record["no_prefetch_us"] = round(timed(call, launches), 2)
        kernels.PREFETCH = True
        # What a graph of a larger bound pays for keys that nobody has.
        record["loose_bound_us"] = round(timed(bench.call(case.rows, 4 * case.context), launches), 2)
    record |= {"bits": "other bits" not in errors.values(), "errors": errors}
    if len(tried) > 1:
        record["tried"] = dict(sorted(figures.items(), key=lambda item: item[1]))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="only this model's shapes")
    parser.add_argument("--tune", action="store_true", help="other plans too, after those in use")
    parser.add_argument("--seconds", type=float, default=60, help="no further line is begun after this")
    parser.add_argument(
        "--extras", action="store_true", help="also rotation apart, no prefetch, 4 times the bound"
    )
    parser.add_argument("--step", action="store_true", help="a step's cases and other plans, late")
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # After a fault the process starts anew, without the plan that had it.
    state = json.loads(options.resume or json.dumps({"begin": time.time(), "done": 0, "bad": []}))
    lines = lines_of(options.model, tune=options.tune, extras=options.extras, of_step=options.step)
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    jobs: dict[tuple[str, int, str], Future[None]] = {}
    for line in lines[state["done"] :]:
        for key, job in line.jobs().items():
            if key not in jobs and key[2] not in state["bad"]:
                jobs[key] = pool.submit(job)
    with torch.no_grad():
        for index, line in enumerate(lines[state["done"] :], state["done"]):
            if time.time() - state["begin"] > options.seconds:
                break
            errors = [jobs[key].exception() for key in line.jobs() if key in jobs]
            record: dict[str, object] = {**asdict(line.case)}
            try:
                record = measure(line, state["bad"])
            except FaultError as error:
                state |= {"done": index, "bad": [*state["bad"], str(error)]}
                record |= {"fault": str(error), "cause": str(error.__cause__)[:300]}
                print(json.dumps(record), flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                given = sys.argv[1 : sys.argv.index("--resume")] if options.resume else sys.argv[1:]
                os.execv(sys.executable, [sys.executable, __file__, *given, "--resume", json.dumps(state)])
            except Exception as error:  # noqa: BLE001 - the other lines are worth having
                record["error"] = f"{type(error).__name__}: {error}"[:500]
            if any(errors):
                record["not_compiled"] = [str(error)[:300] for error in errors if error]
            print(json.dumps(record | {"seconds": round(time.time() - state["begin"], 1)}), flush=True)
    pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
