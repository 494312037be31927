"""Micro-benchmark of the matrix products against torch's and against the time that reading takes.

    python tests/gpu/bench_linear.py                             every shape, 1 to 512 rows
    python tests/gpu/bench_linear.py --tune --seconds 120        tilings tried per shape, best first
    python tests/gpu/bench_linear.py --chain                     whole stacks of layers, with and without PDL

Prints a JSON line per shape and row count as it goes, the most important ones first. With --tune other
processes compile, all at once, in the order of the lines; no line takes longer than --each (waiting for its
compilers not counted), and none is begun after --seconds.

Every figure is the time of one launch among many in a CUDA graph, over copies of the weights that together
do not fit in the L2 cache; median of the replays.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional
from triton.runtime.jit import JITFunction

from eyas.kernels.settings import PDL, use_pdl
from eyas.kernels.triton import linear as kernels
from eyas.kernels.triton.linear_tiling import MAX_SKINNY_ROWS, Tiling, tiling
from eyas.kernels.triton.norm import rms_norm

READ_BYTES_A_SECOND = 4.04e12
"""Measured on an H200 by reading matrices."""
ROTATED_BYTES = 160e6
"""More than three times the L2 cache."""
ROWS = (1, 8, 16, 64, 512)
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One product of a model."""

    model: str
    name: str
    kind: str
    """linear, gated or head (argmax)"""
    out: int
    size: int
    norm: bool = False
    residual: bool = False

    @property
    def weights(self) -> int:
        """Rows of the weight matrix."""
        return self.out * (2 if self.kind == "gated" else 1)


def layer(model: str, hidden: int, q: int, kv: int, intermediate: int, vocab: int) -> list[Case]:
    return [
        Case(model, "qkv", "linear", q + 2 * kv, hidden, norm=True),
        Case(model, "o", "linear", hidden, q, residual=True),
        Case(model, "gate_up", "gated", intermediate, hidden, norm=True),
        Case(model, "down", "linear", hidden, intermediate, residual=True),
        Case(model, "head", "head", vocab, hidden),
        Case(model, "fc", "linear", hidden, 3 * hidden),
    ]


CASES = [
    *layer("8b", 4096, 4096, 1024, 14336, 128256),
    *layer("135m", 576, 576, 192, 1536, 49152),
    *layer("0.5b", 896, 896, 128, 4864, 151936),
]
LAYERS = {"8b": 4, "135m": 30, "0.5b": 24}


@lru_cache(maxsize=1)
def weights_of(rows: int, size: int) -> torch.Tensor:
    copies = max(1, int(ROTATED_BYTES // (rows * size * 2)) + 1) if rows * size * 2 < ROTATED_BYTES else 1
    return torch.randn(copies, rows, size, device="cuda", dtype=torch.bfloat16) * size**-0.5


def timed(call: Callable[[int], object], launches: int, *, replays: int = 7) -> float:
    """Microseconds of one call(i) among `launches` in a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i)
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[2:])


def inputs(case: Case, rows: int) -> dict[str, torch.Tensor]:
    made = {"x": torch.randn(rows, case.size, device="cuda", dtype=torch.bfloat16)}
    if case.norm:
        made["norm_weight"] = torch.rand(case.size, device="cuda").bfloat16() + 0.5
    if case.residual:
        made["residual"] = torch.randn(rows, case.out, device="cuda", dtype=torch.bfloat16)
    return made


def ours(
    case: Case,
    tiles: Tiling,
    weight: torch.Tensor,
    given: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The fused product; in float32 its sums as they are, of which bfloat16 hides most differences."""
    x = given["x"]
    norm = {"norm_weight": given["norm_weight"], "eps": EPS} if case.norm else {}
    if case.kind == "head":
        largest, ids = x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.int64)
        kernels.launch_max(tiles, x, weight, largest, ids, **norm)
        return ids
    out = x.new_empty(len(x), case.out, dtype=dtype)
    kernels.launch(tiles, x, weight, out, residual=given.get("residual"), gated=case.kind == "gated", **norm)
    return out


def library(case: Case, weight: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same by torch, with the norm as a kernel of its own."""
    x = rms_norm(given["x"], given["norm_weight"], EPS) if case.norm else given["x"]
    out = functional.linear(x, weight)
    if case.kind == "head":
        return out.argmax(-1)
    if case.kind == "gated":
        gate, up = out.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return given["residual"] + out if case.residual else out


def table_of(case: Case, rows: int) -> Tiling:
    return tiling(case.out, case.size, rows, gated=case.kind == "gated", head=case.kind == "head")


def launches_of(weights: torch.Tensor) -> int:
    return min(max(len(weights), 10), 150) if weights.numel() < 3e8 else 6


def floor_of(case: Case, rows: int) -> float:
    """Microseconds that reading the weights and the activations takes."""
    moved = case.weights * case.size + rows * (case.size + (0 if case.kind == "head" else case.out))
    return moved * 2 / READ_BYTES_A_SECOND * 1e6


def measure(case: Case, rows: int) -> dict[str, object]:
    """Ours (fused), torch's product alone and with what ours fuses, and the floor."""
    weights, given = weights_of(case.weights, case.size), inputs(case, rows)
    count, copies = launches_of(weights), len(weights)
    record: dict[str, object] = {"model": case.model, "name": case.name, "rows": rows}
    record["floor_us"] = floor_of(case, rows)
    record["ours_us"] = time_of(case, rows, table_of(case, rows))
    record["torch_us"] = timed(lambda i: library(case, weights[i % copies], given), count)
    record["torch_product_us"] = timed(lambda i: functional.linear(given["x"], weights[i % copies]), count)
    record["ours_over_torch"] = record["ours_us"] / record["torch_us"]
    record["ours_over_product"] = record["ours_us"] / record["torch_product_us"]
    record["ours_over_floor"] = record["ours_us"] / record["floor_us"]
    if case.kind == "linear":
        plain = kernels.linear(given["x"], weights[0])
        record["bits_of_torch"] = torch.equal(plain, functional.linear(given["x"], weights[0]))
    return record


def candidates(case: Case, rows: int) -> list[Tiling]:
    """Tilings worth a try, the table's first. Some give other bits than the table's at other row counts."""
    base = table_of(case, rows)
    if base.parts:
        cuts = short_candidates(case, base.parts, rows)
    elif rows <= MAX_SKINNY_ROWS:
        cuts = skinny_candidates(case, rows)
    else:
        cuts = square_candidates(case, base)
    if not base.parts:
        cuts = [replace(cut, splits=base.splits, parallel=base.parallel) for cut in cuts]
    if base.splits > 1:
        cuts += [replace(base, parallel=not base.parallel), replace(base, splits=1, parallel=False)]
    elif case.kind == "linear" and rows <= MAX_SKINNY_ROWS and not base.parts:
        cuts += [replace(base, splits=2, parallel=True, stages=stages) for stages in (3, 4, base.stages)]
    return list(dict.fromkeys([base, *(cut for cut in cuts if fits(case, cut))]))


def skinny_candidates(case: Case, rows: int) -> list[Tiling]:
    """Few rows, long K: what is in flight."""
    fitting = max(16, 1 << (rows - 1).bit_length())
    cuts = [Tiling(64, fitting, 128, 4, stages) for stages in (3, 4, 5, 6) if case.size % 128 == 0]
    cuts += [Tiling(64, fitting, 64, 4, stages) for stages in (3, 4, 5, 6, 7, 8)]
    cuts += [Tiling(64, fitting, 128, 4, 4, tma=True), Tiling(64, fitting, 64, 4, 8, tma=True)]
    if rows > 16 or case.kind == "head":
        cuts += [Tiling(128, fitting, 128, warps, 3) for warps in (4, 8)]
        cuts += [Tiling(128, fitting, 64, 8, 6, tma=True)]
    if rows <= 16 and case.kind == "gated":
        cuts += [Tiling(64, fitting, 128, warps, 3, tma=True) for warps in (4, 8)]
        cuts += [Tiling(64, fitting, 64, 4, stages, tma=True) for stages in (5, 6)]
        cuts += [Tiling(64, fitting, 128, 8, stages) for stages in (3, 4)]
        cuts += [Tiling(64, fitting, 64, 8, stages) for stages in (5, 6, 8)]
        cuts += [
            Tiling(128, fitting, 64, 8, stages, tma=tma) for stages in (4, 5, 6) for tma in (False, True)
        ]
        cuts += [Tiling(128, fitting, 64, 4, 5), Tiling(128, fitting, 128, 8, 3)]
    return cuts


def square_candidates(case: Case, base: Tiling) -> list[Tiling]:
    """Many rows: how much is multiplied at once."""
    shapes = [(128, 256, 8, 4), (128, 256, 8, 3), (128, 128, 8, 4), (128, 128, 4, 4), (128, 128, 4, 3)]
    shapes += [(64, 256, 8, 4), (64, 256, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3), (256, 128, 8, 3)]
    if case.kind == "head":
        shapes += [(128, 128, 8, 3), (128, 128, 8, 5), (128, 128, 4, 5), (128, 256, 8, 5), (256, 128, 8, 4)]
        shapes += [(128, 64, 4, 3), (128, 64, 4, 4), (256, 64, 8, 3), (256, 64, 8, 4)]
    cuts = [Tiling(out, block, 64, warps, stages, tma=True) for out, block, warps, stages in shapes]
    if case.kind == "head":
        cuts += [Tiling(128, 128, 32, warps, stages, tma=True) for warps in (4, 8) for stages in (4, 6)]
        cuts += [Tiling(128, 256, 128, 8, 2, tma=True), Tiling(128, 128, 128, 4, 2, tma=True)]
    return [*cuts, replace(base, tma=False, stages=3), Tiling(128, 128, 128, 8, 3, tma=True)]


def short_candidates(case: Case, parts: int, rows: int) -> list[Tiling]:
    """Of a small model: parts side by side for few rows, one after another for many, both in between.

    Tiles of 64 and more weights take the warp group's instruction instead of the warp's: whether its sums
    have the same bits is what `same_bits` says.
    """
    few = ((16, 8), (16, 16), (32, 8)) if rows <= 64 else ()
    cuts = [Tiling(out, block, 0, parts, 1, parts=parts, parallel=True) for out, block in few]
    if rows > 8:
        many = [(16, 16), (16, 32), (32, 32)] if rows <= 128 else [(32, 128)]
        many += [(16, 64), (32, 64)]
        cuts += [
            Tiling(out, block, 0, 4, stages, parts=parts)
            for out, block in many
            if block < 2 * rows
            for stages in (2, 3, 4)
        ]
        cuts += [
            Tiling(out, block, 0, warps, stages, parts=parts)
            for out, block in ((64, 64), (64, 128), (128, 64))
            if block < 2 * rows
            for warps in (4, 8)
            for stages in (2, 3)
        ]
    if rows > MAX_SKINNY_ROWS:
        cuts += [Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 4, tma=True)]
        cuts += [Tiling(64, 64, 64, 4, 4, tma=True), Tiling(64, 64, 64, 4, 3)]
    else:
        cuts += [Tiling(16, max(16, min(rows, 64)), 64, 4, 9 if case.size < 1024 else 6)]
        cuts += [Tiling(64, max(16, min(rows, 64)), 64, 4, stages) for stages in (3, 5)]
    return cuts


def fits(case: Case, cut: Tiling) -> bool:
    """Whether the tiles in flight go into shared memory, and the sums into registers."""
    wide = cut.block_out * (2 if case.kind == "gated" else 1)
    sums = wide * cut.block_rows / (32 * cut.warps)
    depth = cut.block_k
    if cut.parts:
        # A part's whole length is one tile; with all of K at once nothing is in flight but in registers.
        depth = 0 if cut.parallel else -(-case.size // (16 * cut.parts)) * 16
        sums *= 2
    return (wide + cut.block_rows) * depth * 2 * (cut.stages - bool(cut.parts)) <= 227 * 1024 and sums <= 160


def compile_all(jobs: list[tuple[Case, int, Tiling]]) -> None:
    """Run every tiling once, in threads."""
    weights: dict[tuple[int, int], torch.Tensor] = {}
    for case, _, _ in jobs:
        shape = (case.weights, case.size)
        if shape not in weights:
            weights[shape] = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    def compiled(job: tuple[Case, int, Tiling]) -> None:
        case, rows, tiles = job
        with torch.no_grad():
            ours(case, tiles, weights[case.weights, case.size], inputs(case, rows))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, jobs))
    torch.cuda.synchronize()


def compile_one(case: Case, rows: int, tiles: Tiling, *, exact: bool = True) -> None:
    """In another process: compile the kernels of a tiling into Triton's cache and launch nothing.

    exact: those that write float32, too.
    """
    torch.set_num_threads(1)
    run = JITFunction.run
    JITFunction.run = lambda *given, **options: run(*given, **options | {"warmup": True})
    try:
        weight = torch.empty(case.weights, case.size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for dtype in (torch.bfloat16, torch.float32)[: 2 if exact and case.kind != "head" else 1]:
                ours(case, tiles, weight, inputs(case, rows), dtype)
    finally:
        JITFunction.run = run


class FaultError(Exception):
    """A tiling has broken this process' CUDA context."""


def tune(cases: list[Case], all_rows: list[int], options: argparse.Namespace, state: dict[str, Any]) -> None:
    """Every candidate's time, best first, and whether it gives the bits of the table's choice.

    `state`: when it began, how many lines are done, and the tilings that fault, over restarts.
    """
    models = dict.fromkeys(case.model for case in cases)
    lines = [(case, rows) for rows in all_rows for model in models for case in cases if case.model == model]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    jobs: dict[tuple[Case, int, Tiling], Future[None]] = {}
    for case, rows in lines[state["done"] :]:
        for tiles in candidates(case, rows):
            jobs[case, rows, tiles] = pool.submit(compile_one, case, rows, tiles)
    for index, (case, rows) in enumerate(lines[state["done"] :], state["done"]):
        if time.time() - state["begin"] > options.seconds:
            emit({"model": case.model, "name": case.name, "rows": rows, "skipped": "no time left"})
            continue
        outcome = {tiles: jobs[case, rows, tiles].exception() for tiles in candidates(case, rows)}
        try:
            line = tuned(case, rows, outcome, options.each, state["bad"])
        except FaultError as error:
            emit({"model": case.model, "name": case.name, "rows": rows, "fault": str(error)})
            pool.shutdown(wait=False, cancel_futures=True)
            state |= {"done": index, "bad": [*state["bad"], str(error)]}
            given = sys.argv[1 : sys.argv.index("--resume")] if options.resume else sys.argv[1:]
            os.execv(sys.executable, [sys.executable, __file__, *given, "--resume", json.dumps(state)])
        emit(line | {"seconds": round(time.time() - state["begin"], 1)})
    pool.shutdown(wait=False, cancel_futures=True)


def tuned(
    case: Case, rows: int, outcome: dict[Tiling, BaseException | None], each: float, bad: list[str]
) -> dict[str, object]:
    """The line of one product."""
    weight, given = weights_of(case.weights, case.size)[0], inputs(case, rows)
    base = table_of(case, rows)
    expected = ours(case, base, weight, given, torch.float32)
    found: list[dict[str, object]] = []
    begin = time.monotonic()
    for tiles, failed in outcome.items():
        name = f"{case.model} {case.name} {rows} {vars_of(tiles)}"
        record: dict[str, object] = {"us": None, "tiling": vars_of(tiles)}
        found.append(record)
        if failed or name in bad:
            record["error"] = f"{type(failed).__name__}: {failed}"[:200] if failed else "faults"
            continue
        if time.monotonic() - begin > each:
            record["error"] = "no time left"
            continue
        try:
            same = torch.equal(ours(case, tiles, weight, given, torch.float32), expected)
            record |= {"us": round(time_of(case, rows, tiles), 2), "same_bits": same}
        except Exception as error:
            if "CUDA" in str(error):
                raise FaultError(name) from error
            record["error"] = f"{type(error).__name__}: {error}"[:200]
    line = {"model": case.model, "name": case.name, "rows": rows, "floor_us": round(floor_of(case, rows), 2)}
    line["table_us"], line["table"] = found[0]["us"], vars_of(base)
    return line | {"tried": sorted(found, key=lambda one: one["us"] or 1e9)}


def time_of(case: Case, rows: int, tiles: Tiling) -> float:
    """Microseconds of one tiling."""
    weights, given = weights_of(case.weights, case.size), inputs(case, rows)
    count, copies = launches_of(weights), len(weights)
    return timed(lambda i: ours(case, tiles, weights[i % copies], given), count)


def vars_of(tiles: Tiling) -> str:
    """Short form: out x rows x k, splits (p: side by side), warps, stages, copy engine, parts."""
    cut = f"{tiles.block_out}x{tiles.block_rows}x{tiles.block_k} w{tiles.warps} st{tiles.stages}"
    side = "p" if tiles.parallel else ""
    cut += f" s{tiles.splits}{side}" if tiles.splits > 1 else ""
    return cut + (" tma" if tiles.tma else "") + (f" parts{tiles.parts}{side}" if tiles.parts else "")


def chain(model: str, rows: int) -> dict[str, object]:
    """The four products of every layer after one another, as a decoder has them (attention left out)."""
    qkv, o, gate_up, down = (case for case in CASES if case.model == model and case.name in
                             ("qkv", "o", "gate_up", "down"))  # fmt: skip
    num_layers = LAYERS[model]
    made = [
        {
            case.name: torch.randn(case.weights, case.size, device="cuda").bfloat16() * case.size**-0.5
            for case in (qkv, o, gate_up, down)
        }
        for _ in range(num_layers)
    ]
    x = torch.randn(rows, qkv.size, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(qkv.size, device="cuda", dtype=torch.bfloat16)

    compile_all([(case, rows, table_of(case, rows)) for case in (qkv, o, gate_up, down)])

    def fused(i: int) -> torch.Tensor:
        w = made[i % num_layers]
        heads = kernels.linear(x, w["qkv"], norm_weight=norm, eps=EPS)[:, : o.size]
        stream = kernels.linear(heads, w["o"], residual=x)
        inner = kernels.gated_linear(stream, w["gate_up"], norm_weight=norm, eps=EPS)
        return kernels.linear(inner, w["down"], residual=stream)

    def apart(i: int) -> torch.Tensor:
        w = made[i % num_layers]
        heads = functional.linear(rms_norm(x, norm, EPS), w["qkv"])[:, : o.size]
        stream = x + functional.linear(heads, w["o"])
        gate, up = functional.linear(rms_norm(stream, norm, EPS), w["gate_up"]).chunk(2, dim=-1)
        return stream + functional.linear(functional.silu(gate) * up, w["down"])

    count = num_layers * (2 if model == "8b" else 1)
    record: dict[str, object] = {"model": model, "rows": rows, "per": "layer"}
    record["floor_us"] = (
        sum(c.weights * c.size for c in (qkv, o, gate_up, down)) * 2 / READ_BYTES_A_SECOND * 1e6
    )
    record["torch_us"] = timed(apart, count, replays=5)
    record["ours_us"] = timed(fused, count, replays=5)
    expected = fused(0)
    for choice in PDL[1:]:
        with use_pdl(choice):
            try:
                compile_all([(case, rows, table_of(case, rows)) for case in (qkv, o, gate_up, down)])
                record[f"ours_{choice}_us"] = timed(fused, count, replays=5)
                record[f"{choice}_same_bits"] = torch.equal(fused(0), expected)
            except Exception as error:  # noqa: BLE001 - an option that fails is a result
                record[f"{choice}_error"] = f"{type(error).__name__}: {error}"[:300]
    return record


def emit(record: dict[str, object]) -> None:
    print(json.dumps(record), flush=True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tune", action="store_true", help="try tilings")
    parser.add_argument("--chain", action="store_true", help="whole layers, with and without PDL")
    parser.add_argument("--models", default="135m,8b,0.5b")
    parser.add_argument("--names", default="gate_up,qkv,down,head,o", help="of the products")
    parser.add_argument("--rows", default="")
    parser.add_argument("--seconds", type=float, default=80, help="no further shape is begun after this")
    parser.add_argument("--each", type=float, default=4, help="most seconds of one product in --tune")
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    models = arguments.models.split(",")
    names = arguments.names.split(",")
    cases = [
        case
        for model in models
        for name in names
        for case in CASES
        if (case.model, case.name) == (model, name)
    ]
    default = (1, 8, 64, 512) if arguments.chain else (8, 512, 64, 1) if arguments.tune else ROWS
    all_rows = [int(rows) for rows in arguments.rows.split(",")] if arguments.rows else list(default)
    torch.manual_seed(0)
    emit({"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    with torch.no_grad():
        if arguments.tune:
            fresh = json.dumps({"begin": time.time(), "done": 0, "bad": []})
            tune(cases, all_rows, arguments, json.loads(arguments.resume or fresh))
        elif arguments.chain:
            for model in models:
                for rows in all_rows:
                    if time.monotonic() < deadline:
                        emit(chain(model, rows))
        else:
            compile_all([(case, rows, table_of(case, rows)) for case in cases for rows in all_rows])
            for case in cases:
                for rows in all_rows:
                    if time.monotonic() < deadline:
                        emit(measure(case, rows))


if __name__ == "__main__":
    main()
