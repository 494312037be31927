"""How fast this device reads weights and multiplies matrices, by the library's own products.

read    a skinny product (1 to 16 rows) with a weight far larger than any cache: bytes of the weight a second
flops   a large square product
"""

from dataclasses import asdict, dataclass

import torch
from torch.nn import functional

from eyas.bench.floor import Ceilings
from eyas.bench.step_clock import time_ms

READ_ROWS = (1, 8, 16)
_PRODUCTS = 4
"""Timed together, so that starting a graph does not count."""


@dataclass(frozen=True, slots=True)
class CeilingSizes:
    """How large the products are."""

    read_out: int
    read_in: int
    square: int


CUDA_SIZES = CeilingSizes(read_out=131072, read_in=4096, square=8192)
"""1 GiB of bfloat16 is read; the cache of an H200 holds 50 MB."""
CPU_SIZES = CeilingSizes(read_out=16384, read_in=4096, square=1024)


@dataclass(frozen=True, slots=True)
class CeilingSample:
    """One product that was timed."""

    rows: int
    num_out: int
    num_in: int
    ms: float


@torch.no_grad()
def measure_ceilings(
    device: torch.device, dtype: torch.dtype, sizes: CeilingSizes | None = None
) -> tuple[Ceilings, list[dict[str, float]]]:
    """The best rates of a few products, and the products."""
    sizes = sizes or (CUDA_SIZES if device.type == "cuda" else CPU_SIZES)
    reads = [_time(rows, sizes.read_out, sizes.read_in, device, dtype) for rows in READ_ROWS]
    squares = [_time(sizes.square, sizes.square, sizes.square, device, dtype)]
    ceilings = Ceilings(
        read_bytes_per_second=max(1e3 * s.num_out * s.num_in * dtype.itemsize / s.ms for s in reads),
        flops_per_second=max(2e3 * s.rows * s.num_out * s.num_in / s.ms for s in squares),
    )
    return ceilings, [asdict(sample) for sample in (*reads, *squares)]


def _time(rows: int, num_out: int, num_in: int, device: torch.device, dtype: torch.dtype) -> CeilingSample:
    weight = torch.empty(num_out, num_in, device=device, dtype=dtype).normal_()
    x = torch.empty(rows, num_in, device=device, dtype=dtype).normal_()

    def products() -> None:
        for _ in range(_PRODUCTS):
            functional.linear(x, weight)

    return CeilingSample(rows, num_out, num_in, time_ms(products, device) / _PRODUCTS)
