"""What the kernels of slot attention share: sizes of tiles, and the devices' limits on them."""

# ruff: noqa: ANN001, ANN201 - the bodies of kernels are Triton's language

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


class Tiles(NamedTuple):
    """Sizes of one kernel's tiles: rows (slots x group), keys, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


FORCED: dict[str, Tiles] = {}
"""Tiles by kernel ("forward", "queries", "keys") that stand before the table: for tests and tuning."""
_WORKING: dict[Any, Tiles] = {}


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[Tiles]:
    """Tiles to try in order: a device whose shared memory is too small for one takes the next."""
    if kernel in FORCED:
        return [FORCED[kernel]]
    small = [Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)]
    if dtype == torch.float32 or head_dim > 128:
        return small
    if kernel == "keys":
        return [Tiles(64, 128, 8, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), *small]
    return [Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), *small]


def launch(kernel: str, head_dim: int, dtype: torch.dtype, group: int, run: Callable[[Tiles], None]) -> None:
    """Run a kernel with the first tiles that the device has room for, and remember them."""
    key = (kernel, head_dim, dtype, group, FORCED.get(kernel))
    known = _WORKING.get(key)
    if known is not None:
        run(known)
        return
    failure: Exception | None = None
    for tiles in candidates(kernel, head_dim, dtype):
        if tiles.rows < group:
            continue
        try:
            run(tiles)
        except triton.runtime.errors.OutOfResources as error:
            failure = error
            continue
        _WORKING[key] = tiles
        return
    raise RuntimeError(f"no tiles of {kernel} fit this device ({head_dim=}, {dtype=}, {group=})") from failure


@triton.jit
def dot(a, b, EXACT: tl.constexpr):
    """Product whose float32 operands keep all their bits where EXACT."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def load_rows(
    base, index, stride, inside, d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Rows `index` of a [rows, HEAD_DIM] matrix as [len(index), BLOCK_D]; zeros outside."""
    where = base + index.to(tl.int64)[:, None] * stride + d[None, :]
    if HEAD_DIM == BLOCK_D:
        if MASKED:
            return tl.load(where, mask=inside[:, None], other=0.0)
        return tl.load(where)
    if MASKED:
        return tl.load(where, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return tl.load(where, mask=(d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def edges(low, high, live, BLOCK_N: tl.constexpr):
    """Key tiles of a tile of queries: begin, end, and the middle that every query sees whole."""
    begin = (tl.min(tl.where(live, low, 2147483647)) // BLOCK_N) * BLOCK_N
    end = tl.max(tl.where(live, high, 0))
    full = ((tl.max(tl.where(live, low, 0)) + BLOCK_N - 1) // BLOCK_N) * BLOCK_N
    full_end = (tl.min(tl.where(live, high, 2147483647)) // BLOCK_N) * BLOCK_N
    begin = tl.minimum(begin, end)
    full = tl.minimum(tl.maximum(full, begin), end)
    full_end = tl.maximum(tl.minimum(full_end, end), full)
    left = (full - begin + BLOCK_N - 1) // BLOCK_N
    right = (end - full_end + BLOCK_N - 1) // BLOCK_N
    # Without a middle everything is edge.
    left = tl.where(full_end == full, (end - begin + BLOCK_N - 1) // BLOCK_N, left)
    right = tl.where(full_end == full, 0, right)
    return begin, full, full_end, end, left, right
