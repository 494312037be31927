"""Other cuts of the products than the table's, beside it and beside the library, in one run.

    python tests/gpu/bench_plans.py                          8B at 8 to 896 rows, 135M at 512 to 896
    python tests/gpu/bench_plans.py --models 8b --rows 64    one class of rows

Prints one JSON at the end: of every product and number of rows the floor, the table's cut, torch's product
alone, and all cuts tried, best first, with whether they give the table's bits. Norms are left out (`norms`
has them alone). Cuts with other splits give other bits: they have to pay at all row counts together.
Kernels are compiled in other processes, in the order of the lines; timing as in bench_linear.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from bench_linear import (
    CASES,
    Case,
    compile_one,
    fits,
    floor_of,
    inputs,
    launches_of,
    library,
    ours,
    table_of,
    time_of,
    timed,
    vars_of,
    weights_of,
)
from torch.nn import functional

from eyas.kernels.triton.linear_tiling import Tiling
from eyas.kernels.triton.norm import rms_norm

CLASSES = {8: (8,), 64: (64,), 128: (80, 112, 128), 512: (512, 620, 896)}
"""Row counts that share their cuts."""
NAMES = ("gate_up", "qkv", "down", "o")


def cuts(case: Case, rows: int) -> list[Tiling]:
    """The table's cut of a class of rows, then others."""
    base = table_of(case, rows)
    if base.parts:
        tried = list(parts_cuts(base))
    elif case.kind == "gated":
        tried = list(gated_cuts(rows))
    elif rows == 8:
        tried = list(few_cuts(case))
    elif rows == 64:
        tried = list(skinny_cuts(base))
    else:
        tried = list(wide_cuts(rows, base))
    return list(dict.fromkeys([base, *(cut for cut in tried if fits(case, cut))]))


def skinny_cuts(base: Tiling) -> Iterator[Tiling]:
    """64 rows: 128 weights a tile read the rows half as often; splits make up for the fewer programs."""
    shapes = [(128, 64, 8, 4), (128, 64, 8, 6), (128, 64, 8, 8), (128, 64, 4, 6), (128, 128, 8, 4)]
    for splits in dict.fromkeys((4, 2, base.splits, 3, 8)):
        for out, depth, warps, stages in shapes:
            if splits not in (3, 8) or (out, warps, stages) == (128, 8, 4):
                yield Tiling(out, 64, depth, warps, stages, splits=splits, parallel=splits > 1)
        if splits in (4, 2):
            yield Tiling(128, 64, 64, 8, 6, splits=splits, parallel=True, tma=True)
    yield Tiling(64, 64, 128, 4, 3, splits=4, parallel=True)
    yield replace(base, warps=8)


def few_cuts(case: Case) -> Iterator[Tiling]:
    """8 rows with the splits that pay at 64."""
    for splits in (4, 2, 1, 8):
        for out, depth, warps, stages in ((64, 128, 4, 3), (64, 128, 4, 5), (128, 64, 8, 4)):
            if (splits > 1 or out == 64) and (splits < 8 or stages == 3):
                yield Tiling(out, 16, depth, warps, stages, splits=splits, parallel=splits > 1)
    if case.size <= 4096:
        yield Tiling(64, 16, 128, 4, 5, splits=4)


def wide_cuts(rows: int, base: Tiling) -> Iterator[Tiling]:
    """Past 64 rows: by the copy engine, splits side by side or in turn."""
    if rows == 128:
        shapes = [(64, 128, 64, 4, 4), (64, 128, 64, 8, 6), (128, 128, 64, 8, 4), (128, 128, 64, 8, 6)]
        for splits in dict.fromkeys((base.splits, 4, 2)):
            for out, block, depth, warps, stages in shapes:
                yield Tiling(out, block, depth, warps, stages, splits, splits > 1, tma=True)
            yield Tiling(128, 128, 64, 8, 4, splits, splits > 1)
        yield Tiling(64, 64, 64, 4, 6, base.splits, base.splits > 1)
        return
    shapes = [(128, 128, 64, 8, 4), (128, 256, 64, 8, 4), (64, 128, 64, 4, 3), (128, 128, 64, 4, 3)]
    shapes += [(64, 256, 64, 8, 4)]
    for out, block, depth, warps, stages in shapes:
        yield Tiling(out, block, depth, warps, stages, base.splits, tma=True)
    for splits in (2, 4):
        yield Tiling(128, 128, 64, 8, 4, splits, tma=True)
        yield Tiling(128, 128, 64, 8, 4, splits, parallel=True, tma=True)


def gated_cuts(rows: int) -> Iterator[Tiling]:
    """Gate and up: no splits."""
    block = {8: 16, 64: 64}.get(rows, 128)
    if rows <= 64:
        for stages in (3, 4, 5):
            for tma in (False, True):
                yield Tiling(128, block, 64, 8, stages, tma=tma)
        for warps, depth, stages in ((4, 64, 3), (8, 64, 4), (8, 64, 6)):
            yield Tiling(64, block, depth, warps, stages)
        yield Tiling(64, block, 64, 4, 4, tma=True)
        return
    shapes = [(64, 128, 4, 4), (64, 128, 8, 4), (64, 128, 8, 5), (128, 128, 8, 3), (128, 128, 8, 4)]
    for out, rows_a_tile, warps, stages in [*shapes, (64, 256, 8, 3), (64, 64, 4, 4), (128, 64, 8, 4)]:
        if rows > 128 or rows_a_tile <= 128:
            yield Tiling(out, rows_a_tile, 64, warps, stages, tma=True)


def parts_cuts(base: Tiling) -> Iterator[Tiling]:
    """A small model, many rows; the last ones, without parts, give other bits."""
    shapes = [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
    ]
    shapes += [(64, 32, 4, 3), (64, 32, 4, 2)]
    for out, block, warps, stages in shapes:
        yield Tiling(out, block, 0, warps, stages, parts=base.parts)
    yield Tiling(64, 64, 64, 4, 4)
    yield Tiling(64, 64, 64, 4, 4, tma=True)
    yield Tiling(64, 128, 64, 4, 4, tma=True)


def line_of(case: Case, rows: int, tried: list[Tiling], jobs: dict, bad: list[str]) -> dict[str, object]:
    """One product at one number of rows."""
    weights, given = weights_of(case.weights, case.size), inputs(case, rows)
    count, copies = launches_of(weights), len(weights)
    base = table_of(case, rows)
    expected = ours(case, base, weights[0], given)
    line = {"model": case.model, "name": case.name, "size": case.size, "rows": rows, "table": vars_of(base)}
    line |= {"floor_us": round(floor_of(case, rows), 2), "table_us": round(time_of(case, rows, base), 2)}
    line["torch_us"] = round(timed(lambda i: library(case, weights[i % copies], given), count), 2)
    product = timed(lambda i: functional.linear(given["x"], weights[i % copies]), count)
    line["torch_product_us"] = round(product, 2)
    found: list[tuple[float, str, str]] = []
    failed: list[str] = []
    for tiles in tried:
        name = f"{case.model} {case.name} {case.size} {rows} {vars_of(tiles)}"
        error = jobs[case, tiles].exception()
        if error is not None or name in bad:
            failed.append(f"{vars_of(tiles)}: {type(error).__name__}")
            continue
        try:
            same = torch.equal(ours(case, tiles, weights[0], given), expected)
            found.append((round(time_of(case, rows, tiles), 2), vars_of(tiles), "same" if same else "other"))
        except Exception as broken:
            if "CUDA" in str(broken):
                bad.append(name)
                raise
            failed.append(f"{vars_of(tiles)}: {type(broken).__name__}")
    return line | {"tried": sorted(found), "failed": failed}


def norms(size: int) -> dict[int, float]:
    """Microseconds of the norm alone by rows."""
    weight = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    made = {}
    for rows in (8, 64, 128, 512):
        x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        made[rows] = round(timed(lambda _, x=x: rms_norm(x, weight, 1e-5), 50), 2)
    return made


def main() -> None:
    """Parse, compile, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", default="8b,135m")
    parser.add_argument("--rows", default="64,128,8,512", help="classes of rows, in this order")
    parser.add_argument("--seconds", type=float, default=100, help="no further line is begun after this")
    parser.add_argument("--dry", action="store_true", help="count the cuts and stop")
    parser.add_argument("--state", help=argparse.SUPPRESS)
    given = parser.parse_args()
    state = {"begin": time.time(), "lines": [], "bad": []}
    if given.state:
        state = json.loads(Path(given.state).read_text())
    lines = []
    for kind in (int(rows) for rows in given.rows.split(",")):
        for model in given.models.split(","):
            named = [case for name in NAMES for case in CASES if (case.model, case.name) == (model, name)]
            if model == "8b":
                # The head's first layer reads an embedding beside a hidden state.
                named += [
                    replace(case, size=2 * case.size) for case in named if case.name == "qkv" and kind > 64
                ]
            elif kind != 512:
                continue
            lines += [(replace(case, norm=False), kind) for case in named]
    work = {(case, kind): cuts(case, kind) for case, kind in lines}
    if given.dry:
        kernels = {(case, tiles) for (case, _), tried in work.items() for tiles in tried}
        print(json.dumps({"lines": len(lines), "kernels": len(kernels)}))
        return
    torch.manual_seed(0)
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    jobs: dict[tuple[Case, Tiling], Future[None]] = {}
    done = {(line["model"], line["name"], line["size"], line["rows"]) for line in state["lines"]}
    for (case, kind), tried in work.items():
        for tiles in tried:
            if (case, tiles) not in jobs:
                jobs[case, tiles] = pool.submit(compile_one, case, kind, tiles, exact=False)
    try:
        with torch.no_grad():
            for (case, kind), tried in work.items():
                for rows in CLASSES[kind]:
                    late = time.time() - state["begin"] > given.seconds
                    if late or (case.model, case.name, case.size, rows) in done:
                        continue
                    state["lines"].append(line_of(case, rows, tried, jobs, state["bad"]))
            state["norms"] = {size: norms(size) for size in (4096, 576)}
    except Exception as error:
        if "CUDA" not in str(error) or len(state["bad"]) > 5:
            raise
        # A cut has broken this process' CUDA context: go on in a fresh one, without it.
        pool.shutdown(wait=False, cancel_futures=True)
        path = Path(tempfile.gettempdir()) / f"bench_plans.{os.getpid()}.json"
        path.write_text(json.dumps(state))
        kept = sys.argv[1 : sys.argv.index("--state")] if given.state else sys.argv[1:]
        os.execv(sys.executable, [sys.executable, __file__, *kept, "--state", str(path)])
    pool.shutdown(wait=False, cancel_futures=True)
    state |= {"device": torch.cuda.get_device_name(), "seconds": round(time.time() - state.pop("begin"), 1)}
    print(json.dumps(state))


if __name__ == "__main__":
    main()
