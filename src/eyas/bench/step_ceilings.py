"""How fast this device reads weights and multiplies matrices, by the library's own products.

read    a skinny product (1 to 16 rows) with a weight far larger than any cache: bytes of the weight a second
flops   a large square product

Both twice: in bursts, the device rested, and sustained, after so many products in a row that clocks have
come down to what power allows (dense arithmetic draws all of it). A step alone is held against the first, a
step in a running loop may be held against the second.
"""

import math
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch.nn import functional

from eyas.bench.floor import Ceilings
from eyas.bench.step_clock import Stopwatch

READ_ROWS = (1, 8, 16)
_PRODUCTS = 4
"""Timed together, so that starting a graph does not count."""
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class CeilingSizes:
    """How large the products are."""

    read_out: int
    read_in: int
    square: int
    sustain_seconds: float = 0.02
    """How long each product runs for its sustained rate."""


CUDA_SIZES = CeilingSizes(read_out=131072, read_in=4096, square=8192, sustain_seconds=0.6)
"""1 GiB of bfloat16 is read; the cache of an H200 holds 50 MB."""
CPU_SIZES = CeilingSizes(read_out=16384, read_in=4096, square=1024)


@dataclass(frozen=True, slots=True)
class CeilingSample:
    """One product that was timed."""

    rows: int
    num_out: int
    num_in: int
    ms: float
    sustained_ms: float


@torch.no_grad()
def measure_ceilings(
    device: torch.device, dtype: torch.dtype, sizes: CeilingSizes | None = None
) -> tuple[Ceilings, Ceilings, list[dict[str, float]]]:
    """The best rates of a few products in bursts, the same sustained, and the products."""
    sizes = sizes or (CUDA_SIZES if device.type == "cuda" else CPU_SIZES)
    reads = [_time(rows, sizes.read_out, sizes.read_in, device, dtype, sizes) for rows in READ_ROWS]
    squares = [_time(sizes.square, sizes.square, sizes.square, device, dtype, sizes)]

    def best(name: str) -> Ceilings:
        return Ceilings(
            max(1e3 * s.num_out * s.num_in * dtype.itemsize / getattr(s, name) for s in reads),
            max(2e3 * s.rows * s.num_out * s.num_in / getattr(s, name) for s in squares),
        )

    return best("ms"), best("sustained_ms"), [asdict(sample) for sample in (*reads, *squares)]


def _time(
    rows: int,
    num_out: int,
    num_in: int,
    device: torch.device,
    dtype: torch.dtype,
    sizes: CeilingSizes,
) -> CeilingSample:
    weight = torch.empty(num_out, num_in, device=device, dtype=dtype).normal_()
    x = torch.empty(rows, num_in, device=device, dtype=dtype).normal_()

    def products() -> None:
        for _ in range(_PRODUCTS):
            functional.linear(x, weight)

    products()
    watch = Stopwatch([products], device)
    watch.round()
    burst = median(watch.round()[0] for _ in range(_ROUNDS))
    sustained = watch.in_a_row(max(2, math.ceil(1e3 * sizes.sustain_seconds / burst)))
    return CeilingSample(rows, num_out, num_in, burst / _PRODUCTS, sustained / _PRODUCTS)
