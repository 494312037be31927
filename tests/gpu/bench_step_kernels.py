"""Micro-benchmark of the kernels between the forwards of a step, and of their reference twins.

    python tests/gpu/bench_step_kernels.py             one JSON object a line
    python tests/gpu/bench_step_kernels.py --markov    corrected guesses alone, by PDL and cut otherwise

`floor_us` is the time of reading and writing what the kernel must (an empty launch in a graph costs about
1.5 us more); corrected guesses must read the output matrix once a depth. Chains of K = 7, trees of 24 nodes;
8B and 135M shapes at 1, 8 and 64 requests.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from eyas.kernels import dispatch_step as step
from eyas.kernels.dispatch import use_backend
from eyas.kernels.reference.step_expand import MaskRow
from eyas.kernels.reference.step_grow import Pool
from eyas.kernels.reference.step_settle import StateRows
from eyas.kernels.reference.step_take import Source
from eyas.kernels.settings import use_pdl
from eyas.kernels.triton import step_markov

sys.path.insert(0, str(Path(__file__).parent))
from bench_linear import READ_BYTES_A_SECOND, ROTATED_BYTES, timed

MODELS = {"8b": (4096, 32, 8, 128, 32000), "135m": (576, 30, 3, 64, 16384)}
"""Hidden size, layers, KV heads, head dimension, draft vocabulary."""
K, NODES, DEPTH, TOP_K, PAGES, MAX_LEN = 7, 24, 5, 4, 512, 8192
CUTS = [(64, 16), (256, 16)], [(128, 16), (128, 64), (64, 32)]
"""Others than step_markov's own (128 ids and 16 or 32 requests a program): of few requests, of many."""

Call = Callable[[], object]


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, device="cuda")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def state_kernels(batch: int) -> dict[str, tuple[Call, float]]:
    """Those that read and write the state rows: (call, bytes)."""
    rows, slots = batch + 1, torch.arange(batch, device="cuda")
    length, live = ints(1000, rows), torch.ones(rows, dtype=torch.bool, device="cuda")
    history, last = ints(99, rows, MAX_LEN + K + 2), ints(99, rows)
    limit = torch.full((rows,), MAX_LEN, device="cuda")
    drafts, pages = ints(99, rows, K), ints(99, rows, PAGES).int()
    source = Source(last, length, live, drafts, limit, pages, torch.zeros(rows, device="cuda"), limit)
    settled = StateRows(last, length, live, history, limit, live.clone(), ints(99, 2))
    tokens, bad = ints(99, batch, K + 1), torch.zeros(batch, K + 1, dtype=torch.bool, device="cuda")
    some_drafts, start = drafts[:batch].clone(), length[:batch].clone()
    return {
        "take": (lambda: step.take(slots, source, K), batch * (8 * PAGES + 32 * K)),
        "settle": (
            lambda: step.settle(tokens, None, bad, some_drafts, slots, start, settled),
            batch * 40 * K,
        ),
    }


def row_kernels(model: str, batch: int) -> dict[str, tuple[Call, float]]:
    """The drafter's rows."""
    hidden, _, _, _, _ = MODELS[model]
    tokens, counts = ints(999, batch, K + 1), ints(K + 1, batch) + 1
    table, norm = normal(1000, hidden), normal(hidden)
    fused, mask = normal(batch * (K + 1), hidden), MaskRow(7, normal(hidden), normal(hidden))
    all_rows = normal(batch * 2 * K, hidden)
    row = 2 * hidden
    return {
        "expand, K + 1 rows": (
            lambda: step.expand(tokens, counts, fused, table, norm, norm, 1e-5),
            4 * batch * (K + 1) * row,
        ),
        "expand, 1 row": (
            lambda: step.expand(tokens[:, :1], counts, fused[:batch], table, norm, norm, 1e-5),
            4 * batch * row,
        ),
        "expand with mask rows": (
            lambda: step.expand(tokens, counts, fused, table, norm, norm, 1e-5, mask=mask, extra=K - 1),
            (2 * (K + 1) + 6 * K) * batch * row,
        ),
        "newest": (lambda: step.newest(all_rows, counts, K), 2 * batch * K * row),
    }


def tree_kernels(model: str, batch: int) -> dict[str, tuple[Call, float]]:
    """Trees of 24 nodes."""
    _, layers, heads, size, vocab = MODELS[model]
    index = torch.arange(NODES, device="cuda")
    parents = torch.where(index < TOP_K, 0, index - TOP_K + 1).expand(batch, -1).contiguous()
    shape = step.tree_shape(parents, NODES)
    choices, tokens = ints(2, batch, NODES + 1), ints(2, batch, NODES + 1)
    caches = torch.randn(2, layers, batch * 4 + 1, 16, heads, size, device="cuda", dtype=torch.bfloat16)
    pages = (torch.arange(batch * 4, device="cuda") + 1).view(batch, 4).int()
    nodes = torch.tensor([0, 2, 5, 9, 14, 20], device="cuda").expand(batch, -1).contiguous()
    start = torch.full((batch,), 20, device="cuda")
    counts = torch.full((batch,), DEPTH + 1, device="cuda")
    keys, values = list(caches[0]), list(caches[1])
    logits = normal(batch * TOP_K, vocab)
    pool = Pool(
        torch.zeros(batch, 128, dtype=torch.int64, device="cuda"),
        torch.zeros(batch, 128, device="cuda"),
        torch.zeros(batch, 128, dtype=torch.int64, device="cuda"),
        torch.zeros(batch, 128, dtype=torch.bool, device="cuda"),
    )
    log_q = -torch.rand(batch, 1, TOP_K, device="cuda").sort(-1).values
    frontier = step.grow(pool, 0, None, ints(99, batch, 1, TOP_K), log_q, TOP_K)
    below = -torch.rand(batch, TOP_K, TOP_K, device="cuda").sort(-1).values
    children = ints(99, batch, TOP_K, TOP_K)
    moved = 4 * DEPTH * batch * layers * heads * size * 2
    return {
        "tree_shape": (lambda: step.tree_shape(parents, DEPTH), 32 * batch * NODES),
        "accept_path": (lambda: step.accept_path(choices, tokens, *shape, NODES), 40 * batch * NODES),
        "move_nodes": (lambda: step.move_nodes(keys, values, pages, start, nodes, counts, MAX_LEN), moved),
        "top_logprobs": (lambda: step.top_logprobs(logits, TOP_K), 2 * batch * TOP_K * vocab),
        "grow": (lambda: step.grow(pool, 4, frontier, children, below, TOP_K), 64 * batch * TOP_K**2),
        "best": (lambda: step.best(pool, 68, NODES), 32 * batch * 68),
    }


def bench_markov(batch: int, vocab: int, rank: int) -> None:
    """Corrected guesses with all that they read beyond L2 at first, as after a step's forward."""
    num_bytes = 2 * (batch * K * (vocab + rank) + 2 * vocab * rank)
    copies = int(ROTATED_BYTES // num_bytes) + 1
    logits, pre = normal(copies, batch, K, vocab), normal(copies, batch, K, rank)
    table, out = normal(copies, vocab, rank), normal(copies, vocab, rank)
    index_map = torch.arange(vocab, device="cuda") * 2

    def call(i: int) -> torch.Tensor:
        i %= copies
        return step.markov_guess(logits[i], pre[i], table[i], out[i], index_map, silu=True)

    record = {"kernel": "markov_guess", "vocab": vocab, "rank": rank, "batch": batch}
    read = 2 * (batch * K * vocab + (K - 1) * (vocab * rank + 2 * batch * rank))
    record["floor_us"] = read / READ_BYTES_A_SECOND * 1e6
    with torch.no_grad():
        with use_backend("reference"):
            record["reference_us"] = timed(call, 10)
        for pdl in ("off", "late", "auto"):
            with use_pdl(pdl):
                record[f"triton_{pdl}_us"] = timed(call, 50)
        tiles = step_markov.tiling(vocab, rank, 2, batch)
        for block, requests in CUTS[batch > 16]:
            warps = 8 if block * rank > 1 << 14 else 4
            cut = replace(tiles, block=block, requests=requests, warps=warps)

            def other(i: int, cut: step_markov.Tiling = cut) -> torch.Tensor:
                i %= copies
                return step_markov.launch(cut, logits[i], pre[i], table[i], out[i], index_map, silu=True)

            record[f"block_{block}_requests_{requests}_us"] = timed(other, 50)
    print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markov", action="store_true", help="corrected guesses alone")
    only_markov = parser.parse_args().markov
    for batch in (1, 8, 64):
        for rank in (32, 128, 256):
            bench_markov(batch, 14848, rank)
    if only_markov:
        return
    for model in MODELS:
        for batch in (1, 8, 64):
            calls = {**state_kernels(batch), **row_kernels(model, batch), **tree_kernels(model, batch)}
            for name, (call, num_bytes) in calls.items():
                record = {"kernel": name, "model": model, "batch": batch}
                record["floor_us"] = num_bytes / READ_BYTES_A_SECOND * 1e6
                with torch.no_grad():
                    for backend in ("triton", "reference"):
                        with use_backend(backend):
                            record[f"{backend}_us"] = timed(lambda _, call=call: call(), 50)
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
