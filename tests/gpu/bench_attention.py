"""Micro-benchmark of decode attention against reading the keys and values, and against torch's.

    python tests/gpu/bench_attention.py --json               all cases
    python tests/gpu/bench_attention.py --json --model 8b    one model

Every figure is the time of one layer among many in a CUDA graph, over caches that together do not fit in the
L2 cache; median of the replays. `fused` starts from qkv as projected: rotation, cache write and attention;
`apart` is the same with the rotation as a kernel of its own, `second_pass` with the fold as one. torch's
attention reads keys and values that are contiguous and rotated already, and writes none.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from eyas.kernels.reference.rows import Rows
from eyas.kernels.triton import paged_attention as kernels
from eyas.kernels.triton.rows import chain_rows

sys.path.insert(0, str(Path(__file__).parent))
from bench_linear import READ_BYTES_A_SECOND, ROTATED_BYTES, timed

PAGE = 16
MODELS = {"8b": (32, 8, 128), "135m": (9, 3, 64), "0.5b": (14, 2, 64)}


@dataclass(frozen=True)
class Case:
    """`rows` new rows of each of `batch` requests with `context` keys each, the new ones included."""

    model: str
    batch: int
    rows: int
    context: int


CASES = [
    *(Case(m, b, r, c) for m in MODELS for b in (1, 8, 64) for r in (1, 8) for c in (1024, 4096)),
    *(Case(m, 1, 62, 1024) for m in MODELS),
    *(Case(m, 1, 2048, c) for m in MODELS for c in (2048, 8192)),
]


class Bench:
    """The tensors of one case; `copies` layers of cache."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.heads, self.kv_heads, self.head_dim = MODELS[case.model]
        pages = case.context // PAGE
        self.kv_bytes = 2 * case.batch * case.context * self.kv_heads * self.head_dim * 2
        self.copies = min(max(int(ROTATED_BYTES // self.kv_bytes) + 1, 2), 40)
        shape = (self.copies, case.batch * pages + 1, PAGE, self.kv_heads, self.head_dim)
        self.keys, self.values = (self._normal(*shape) for _ in range(2))
        table = torch.randperm(case.batch * pages, device="cuda") + 1
        # Wider than the context, as a page table for longer requests is.
        self.table = functional.pad(table.view(case.batch, pages).int(), (0, 3 * pages))
        start = torch.full((case.batch,), case.context - case.rows, device="cuda")
        counts = torch.full_like(start, case.rows)
        self.fields: Rows = chain_rows(start, counts, self.table, case.rows, PAGE, case.context)
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = self._normal(case.batch * case.rows, width)
        self.cos, self.sin = torch.rand(2, case.batch * case.rows, self.head_dim // 2, device="cuda")

    @staticmethod
    def _normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def ours(self, layer: int, memo: dict[str, torch.Tensor], max_visible: int) -> torch.Tensor:
        fields, layer = self.fields, layer % self.copies
        return kernels.rotated_attention(
            self.qkv,
            self.cos,
            self.sin,
            self.keys[layer],
            self.values[layer],
            fields.slots,
            self.table,
            fields.q_start,
            fields.visible,
            num_heads=self.heads,
            scale=self.head_dim**-0.5,
            max_rows=self.case.rows,
            max_visible=max_visible,
            memo=memo,
        )

    def torchs(self) -> Callable[[int], torch.Tensor]:
        """SDPA of the same rows; a full context for few rows, causal for a whole prompt."""
        case = self.case
        queries = self._normal(case.batch, self.heads, case.rows, self.head_dim)
        shape = (self.copies, case.batch, self.kv_heads, case.context, self.head_dim)
        keys, values = (self._normal(*shape) for _ in range(2))

        def call(layer: int) -> torch.Tensor:
            layer %= self.copies
            causal = case.rows == case.context
            return functional.scaled_dot_product_attention(
                queries, keys[layer], values[layer], is_causal=causal, enable_gqa=True
            )

        return call


def measure(case: Case) -> dict[str, object]:
    bench = Bench(case)
    launches = min(max(bench.copies, 10), 40)
    memo: dict[str, torch.Tensor] = {}
    floor = (bench.kv_bytes + 2 * bench.qkv.numel() * 2) / READ_BYTES_A_SECOND * 1e6
    record: dict[str, object] = {**asdict(case), "floor_us": floor}
    switches = {"fused": (True, True), "apart": (False, True), "second_pass": (True, False)}
    for name, (fuse, folds) in switches.items():
        kernels.FUSE_ROTATION, kernels.LAST_FOLDS = fuse, folds
        record[f"{name}_us"] = timed(lambda i: bench.ours(i, memo, case.context), launches)
    kernels.FUSE_ROTATION = kernels.LAST_FOLDS = True
    # What a graph of a larger bound pays for chunks that nobody has.
    record["loose_bound_us"] = timed(lambda i: bench.ours(i, memo, 4 * case.context), launches)
    record["torch_us"] = timed(bench.torchs(), launches)
    record["fused_over_floor"] = record["fused_us"] / floor
    record["fused_over_torch"] = record["fused_us"] / record["torch_us"]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--model", choices=MODELS, help="only this model's shapes")
    options = parser.parse_args()
    begin, records = time.perf_counter(), []
    with torch.no_grad():
        for case in CASES:
            if options.model in (None, case.model):
                records.append(measure(case))
                if not options.json:
                    print(
                        " ".join(
                            f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in records[-1].items()
                        )
                    )
    if options.json:
        seconds = time.perf_counter() - begin
        print(json.dumps({"device": torch.cuda.get_device_name(), "seconds": seconds, "attention": records}))


if __name__ == "__main__":
    main()
