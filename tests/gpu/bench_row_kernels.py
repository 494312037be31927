"""Micro-benchmark of the small kernels around and inside a forward, and of their reference twins.

    python tests/gpu/bench_row_kernels.py     one JSON object a line

Norm, angles, rotation, cache writes, the fields of rows and forced acceptance; those between the forwards are
bench_step_kernels'. `floor_us` is the time of reading and writing what the kernel must; an empty launch in a
graph costs about 1.5 us more. K + 1 rows of 1, 8 and 64 requests of the 8B and 135M shapes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from eyas.kernels import dispatch, dispatch_step
from eyas.kernels.dispatch import use_backend
from eyas.kernels.reference import rotary as reference_rotary
from eyas.kernels.triton import rotary as triton_rotary

sys.path.insert(0, str(Path(__file__).parent))
from bench_linear import READ_BYTES_A_SECOND, timed

MODELS = {"8b": (4096, 32, 8, 128), "135m": (576, 9, 3, 64)}
"""Hidden size, heads, KV heads, head dimension."""
K, PAGE, PAGES, START, MAX_LEN = 7, 16, 512, 1000, 8192

Call = Callable[[], object]


def normal(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def layer_kernels(model: str, batch: int, device: str) -> dict[str, tuple[Call, Call, float]]:
    """Those that stand in every layer: (Triton's call, the reference's, bytes)."""
    hidden, heads, kv_heads, size = MODELS[model]
    rows, wide = batch * (K + 1), heads + 2 * kv_heads
    x, weight = normal(rows, hidden, device=device), normal(hidden, device=device)
    qkv = normal(rows, wide * size, device=device)
    queries = qkv.view(rows, wide, size)[:, :heads]
    cos, sin = torch.rand(2, rows, size // 2, device=device)
    keys, values = (normal(rows, kv_heads, size, device=device) for _ in range(2))
    caches = [normal(batch + 1, PAGE, kv_heads, size, device=device) for _ in range(2)]
    slots = torch.arange(rows, device=device) + PAGE
    lines, head = 2 * rows * size, 4 * rows * size

    def rotate(module: object) -> Call:
        return lambda: module.rotate_and_cache(qkv, cos, sin, *caches, slots, num_heads=heads)

    def same(call: Call, num_bytes: float) -> tuple[Call, Call, float]:
        return call, call, num_bytes

    return {
        "rms_norm": same(lambda: dispatch.rms_norm(x, weight, 1e-5), 4 * rows * hidden + 2 * hidden),
        "apply_rope": same(lambda: dispatch.apply_rope(queries, cos, sin), 2 * lines * heads + head),
        "write_kv": same(lambda: dispatch.write_kv(keys, values, *caches, slots), 4 * lines * kv_heads),
        "rotate_and_cache": (rotate(triton_rotary), rotate(reference_rotary), 2 * lines * wide + head),
    }


def step_kernels(model: str, batch: int, device: str) -> dict[str, tuple[Call, Call, float]]:
    """Those that stand in a step once for each forward."""
    size = MODELS[model][3]
    rows = batch * (K + 1)
    tables = torch.rand(2, MAX_LEN, size // 2, device=device)
    start = torch.full((batch,), START, device=device)
    positions = (start[:, None] + torch.arange(K + 1, device=device)).flatten()
    pages = torch.arange(batch * PAGES, device=device).view(batch, PAGES).int()
    counts = torch.full((batch,), K + 1, device=device)
    depths = torch.arange(K + 1, device=device).expand(batch, -1).contiguous()
    bits = (torch.ones_like(depths) << (depths + 1)) - 1
    tokens = torch.randint(0, 99, (batch, K + 1), device=device)
    lengths = torch.randint(0, K, (1024,), device=device)
    slots, drafts = torch.arange(batch, device=device), tokens[:, 1:].contiguous()
    calls = {
        "angles": (lambda: dispatch.angles(positions, *tables), rows * (8 + 8 * size)),
        "chain_rows": (
            lambda: dispatch.chain_rows(start, counts, pages, K + 1, PAGE, MAX_LEN),
            rows * 24 + batch * 24,
        ),
        "tree_rows": (
            lambda: dispatch.tree_rows(start, depths, bits, pages, 0, PAGE, MAX_LEN),
            rows * 44 + batch * 16,
        ),
        "force": (lambda: dispatch_step.force(tokens, drafts, start, slots, lengths), rows * 32),
    }
    return {name: (call, call, num_bytes) for name, (call, num_bytes) in calls.items()}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for model in MODELS:
        for batch in (1, 8, 64):
            calls = layer_kernels(model, batch, "cuda") | step_kernels(model, batch, "cuda")
            for name, (triton_call, reference_call, num_bytes) in calls.items():
                record = {"kernel": name, "model": model, "batch": batch}
                record["floor_us"] = num_bytes / READ_BYTES_A_SECOND * 1e6
                with torch.no_grad():
                    for backend, call in (("triton", triton_call), ("reference", reference_call)):
                        with use_backend(backend):
                            record[f"{backend}_us"] = timed(lambda _, call=call: call(), 50)
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
