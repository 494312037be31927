"""Micro-benchmark of the matrix products against torch's and against the time that reading takes.

    python tests/gpu/bench_linear.py --json                      every shape, 1 to 512 rows
    python tests/gpu/bench_linear.py --sweep --seconds 80        tilings tried per shape, best first
    python tests/gpu/bench_linear.py --chain                     whole stacks of layers, with and without PDL

Every figure is the time of one launch among many in a CUDA graph, over copies of the weights that together
do not fit in the L2 cache; median of the replays.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn import functional

from eyas.kernels.settings import use_pdl
from eyas.kernels.triton import linear as kernels
from eyas.kernels.triton.linear_tiling import Tiling, tiling
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


def ours(case: Case, tiles: Tiling, weight: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    x = given["x"]
    norm = {"norm_weight": given["norm_weight"], "eps": EPS} if case.norm else {}
    if case.kind == "head":
        largest, ids = x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.int64)
        kernels.launch_max(tiles, x, weight, largest, ids, **norm)
        return ids
    out = x.new_empty(len(x), case.out)
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
    return tiling(case.out, case.size, rows, gated=case.kind == "gated")


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
    fitting = max(16, 1 << (rows - 1).bit_length())
    tried = [base]

    def add(block_out: int, block_rows: int, block_k: int, warps: int, stages: int, splits: int = 0) -> None:
        splits = splits or base.splits
        programs = -(-case.out // block_out) * -(-rows // block_rows)
        halves = 2 if case.kind == "gated" else 1
        if (block_out * halves + block_rows) * block_k * 2 * stages > 227 * 1024:
            return
        tried.append(
            replace(
                base,
                block_out=block_out,
                block_rows=block_rows,
                block_k=block_k,
                warps=warps,
                stages=stages,
                splits=splits,
                parallel=splits > 1 and programs * splits <= 400,
            )
        )

    if rows <= 64:
        if case.weights < 60 * 64:
            for block_out, warps, stages in ((16, 4, 4), (16, 2, 8), (32, 4, 4), (32, 2, 6), (64, 4, 6)):
                add(block_out, fitting, 64, warps, stages)
            add(16, fitting, 64, 4, 6, 2 if base.splits == 1 and case.kind == "linear" else 1)
            add(32, fitting, 128, 4, 4)
        else:
            for block_out, warps, stages in ((64, 4, 3), (64, 4, 5), (64, 4, 6), (128, 4, 3), (128, 8, 4)):
                add(block_out, fitting, 128, warps, stages)
            add(64, fitting, 64, 4, 8)
            add(128, fitting, 64, 4, 6)
            for splits in (1, 2, 3) if case.kind == "linear" else ():
                if splits != base.splits:
                    add(64, fitting, 128, 4, 4, splits)
    else:
        for block_out, block_rows, block_k, warps, stages in (
            (128, 128, 64, 8, 3), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (64, 256, 64, 8, 4),
            (64, 128, 64, 4, 4), (256, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 64, 64, 4, 5),
        ):  # fmt: skip
            add(block_out, block_rows, block_k, warps, stages)
        wide = [cut for cut in tried if cut.block_out >= 64]
        tried += [replace(cut, tma=True) for cut in wide if cut.block_out * cut.block_rows >= 128 * 128]
    if case.norm:
        tried += [replace(cut, norm_in_loop=not cut.norm_in_loop) for cut in tried[:3]]
    return list(dict.fromkeys(tried))


def compile_all(jobs: list[tuple[Case, int, Tiling]], deadline: float) -> list[str | None]:
    """Run every tiling once, by threads: "" where it ran, the error, or None where time was up."""
    weights: dict[tuple[int, int], torch.Tensor] = {}
    for case, _, _ in jobs:
        shape = (case.weights, case.size)
        if shape not in weights:
            weights[shape] = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)

    def compiled(job: tuple[Case, int, Tiling]) -> str | None:
        case, rows, tiles = job
        if time.monotonic() > deadline:
            return None
        try:
            ours(case, tiles, weights[case.weights, case.size], inputs(case, rows))
        except Exception as error:  # noqa: BLE001 - a tiling that does not fit is a result
            return f"{type(error).__name__}: {error}"[:200]
        return ""

    with ThreadPoolExecutor(12) as pool:
        outcome = list(pool.map(compiled, jobs))
    torch.cuda.synchronize()
    return outcome


def sweep(cases: list[Case], all_rows: list[int], deadline: float) -> list[dict[str, object]]:
    """Every candidate's time, best first. If time runs out, every shape has had the first row counts."""
    records = []
    for rows in all_rows:
        jobs = [(case, rows, tiles) for case in cases for tiles in candidates(case, rows)]
        outcome = compile_all(jobs, deadline)
        for case in cases:
            found: list[dict[str, object]] = []
            for (other, _, tiles), failed in zip(jobs, outcome, strict=True):
                if other != case or failed is None or time.monotonic() > deadline:
                    continue
                if failed:
                    found.append({"us": None, "error": failed, "tiling": vars_of(tiles)})
                    continue
                found.append({"us": time_of(case, rows, tiles), "tiling": vars_of(tiles)})
            if found:
                records.append(
                    {"model": case.model, "name": case.name, "rows": rows, "floor_us": floor_of(case, rows)}
                    | {"table_us": found[0]["us"], "tried": sorted(found, key=lambda one: one["us"] or 1e9)}
                )
    return records


def time_of(case: Case, rows: int, tiles: Tiling) -> float:
    """Microseconds of one tiling."""
    weights, given = weights_of(case.weights, case.size), inputs(case, rows)
    count, copies = launches_of(weights), len(weights)
    return timed(lambda i: ours(case, tiles, weights[i % copies], given), count)


def vars_of(tiles: Tiling) -> str:
    """Short form: out x rows x k, splits (p: side by side), warps, stages, norm's place."""
    side = "p" if tiles.parallel else ""
    cut = f"{tiles.block_out}x{tiles.block_rows}x{tiles.block_k} s{tiles.splits}{side}"
    place = "loop" if tiles.norm_in_loop else "pass"
    return f"{cut} w{tiles.warps} st{tiles.stages} {place}{' tma' if tiles.tma else ''}"


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
    record["torch_us"] = timed(apart, count)
    record["ours_us"] = timed(fused, count)
    expected = fused(0)
    with use_pdl(on=True):
        try:
            record["ours_pdl_us"] = timed(fused, count)
            record["pdl_same_bits"] = torch.equal(fused(0), expected)
        except Exception as error:  # noqa: BLE001 - an option that fails is a result
            record["pdl_error"] = f"{type(error).__name__}: {error}"[:300]
    return record


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--sweep", action="store_true", help="try tilings")
    parser.add_argument("--chain", action="store_true", help="whole layers, with and without PDL")
    parser.add_argument("--models", default="8b,135m,0.5b")
    parser.add_argument("--names", default="qkv,o,gate_up,down,head", help="of the products")
    parser.add_argument("--rows", default="")
    parser.add_argument("--seconds", type=float, default=80, help="a sweep stops here")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    models = arguments.models.split(",")
    names = arguments.names.split(",")
    cases = [case for model in models for case in CASES if case.model == model and case.name in names]
    default = (8, 64, 512) if arguments.sweep or arguments.chain else ROWS
    all_rows = [int(rows) for rows in arguments.rows.split(",")] if arguments.rows else list(default)
    torch.manual_seed(0)
    with torch.no_grad():
        if arguments.sweep:
            records = sweep(cases, all_rows, deadline)
        elif arguments.chain:
            records = [chain(model, rows) for model in models for rows in all_rows]
        else:
            compile_all([(case, rows, table_of(case, rows)) for case in cases for rows in all_rows], deadline)
            records = [measure(case, rows) for case in cases for rows in all_rows]
    device = torch.cuda.get_device_name()
    if arguments.json:
        print(json.dumps({"device": device, "torch": torch.__version__, "records": records}))
        return
    for record in records:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
