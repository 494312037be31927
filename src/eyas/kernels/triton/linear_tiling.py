"""Tile shapes of the matrix products: one table, chosen by the weight's shape and the number of rows.

What decides a row's bits depends on the weight alone: `splits`, `parts` and, without parts, whether the tile
is 64 or more weights wide, which is what picks the tensor core instruction. (16-wide steps within a part give
the same bits by both: measured.) The rest may depend on the rows.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

NUM_SMS = 132
"""Of an H100 or H200. The table may not ask the device: the bits would change with it."""
SHARED_BYTES = 227 * 1024
"""Of an SM, for its programs' tiles."""
WIDE = 64
"""Weights that the warp-group instructions of Hopper take at once."""
MAX_SKINNY_ROWS = 64
"""Up to here reading the weights is the cost; past it, multiplying."""
MAX_MEDIUM_ROWS = 768
"""Up to here the small tiles of `_square` are quicker, past it the large ones; measured at 512 and 896."""
MOST_DEPTH = 128
"""Largest `block_k`; all others divide it."""
MAX_SHORT = 2048
"""Longest K that a program of linear_short.py holds in registers."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one product is cut."""

    block_out: int
    """weights of a tile; of gate and of up each, where there are two"""
    block_rows: int
    block_k: int
    warps: int
    stages: int
    """tiles in flight"""
    splits: int = 1
    """parts of K that are summed apart and added in order"""
    parallel: bool = False
    """whether the splits run in programs of their own, the parts in warps of their own"""
    tma: bool = False
    """tiles fetched by the copy engine (Hopper), which spares the threads their addresses"""
    parts: int = 0
    """of K, summed apart and added in order: side by side (linear_short.py), else one after another
    (linear_parts.py). 0: linear_kernels.py"""

    def length(self, size: int) -> int:
        """Return the k of a split, whole tiles. Splits begin at the same k whatever a tile's depth."""
        depth = self.block_k if self.splits == 1 else max(self.block_k, MOST_DEPTH)
        return -(-size // (self.splits * depth)) * depth


@lru_cache(maxsize=4096)
def tiling(out: int, size: int, rows: int, *, gated: bool = False, head: bool = False) -> Tiling:
    """The tiles of rows [rows, size] x weight [out, size]; `out` of one half if gated; head: for argmax.

    Example: out 4096, size 4096, rows 8 -> 64 tiles of 64 weights in 2 K-splits, 128 programs on 132 SMs.
    """
    weights = out * (2 if gated else 1)
    small = weights < 60 * WIDE
    if small and size <= MAX_SHORT and not head:
        return _short(out, size, rows, gated=gated)
    # With less than a wave of wide tiles K is shared out, unless it is short: meeting costs a microsecond.
    splits = 2 if size >= 2048 and weights < 80 * WIDE and not gated and not head else 1
    if small:
        tiles = Tiling(32, min(_fitting(rows), 64), 64, 4, 6 if rows <= MAX_SKINNY_ROWS else 4)
    elif rows <= MAX_SKINNY_ROWS:
        tiles = _skinny(out, size, rows, gated=gated, splits=splits)
    else:
        tiles = _square(out, size, rows, gated=gated, splits=splits)
    programs = -(-out // tiles.block_out) * -(-rows // tiles.block_rows)
    # Side by side where there are SMs for it.
    return replace(tiles, splits=splits, parallel=splits > 1 and programs * splits <= NUM_SMS)


def _fitting(rows: int) -> int:
    """The next power of two from 16 on."""
    return max(16, 1 << (rows - 1).bit_length())


def _short(out: int, size: int, rows: int, *, gated: bool) -> Tiling:
    """Few weights, short K: launches and latency are the cost; with more rows, multiplying."""
    parts = 4 if size <= 640 else 8
    few = 8 if rows <= 16 else 16
    programs = -(-out // 16) * -(-rows // few)
    # Up to two waves of programs that hold all of a short K.
    if rows <= 32 or (rows <= MAX_SKINNY_ROWS and parts == 4 and programs <= 2 * NUM_SMS):
        return Tiling(16, few, 0, warps=parts, stages=1, parts=parts, parallel=True)
    if rows <= 128:
        wide = gated and parts == 4
        return Tiling(16, 64 if wide else 32, 0, warps=4, stages=3 if wide else 4, parts=parts)
    # Past a wave two programs have to fit in an SM.
    programs = -(-out // WIDE) * -(-rows // WIDE)
    stage = (3 if gated else 2) * WIDE * (size // parts) * 2
    if programs > NUM_SMS:
        stages = 2 if 3 * stage > SHARED_BYTES // 2 else 3
    elif parts == 8 and programs <= 3 * NUM_SMS // 4 and 9 * stage // 4 <= SHARED_BYTES // 2:
        return Tiling(WIDE, WIDE // 2, 0, warps=4, stages=3, parts=parts)
    else:
        stages = 4 if 4 * stage <= SHARED_BYTES else 3
    return Tiling(WIDE, WIDE, 0, warps=4, stages=stages, parts=parts)


def _skinny(out: int, size: int, rows: int, *, gated: bool, splits: int) -> Tiling:
    """Reading the weights is the cost: as much in flight as fits, and no second wave of programs."""
    block_rows = _fitting(rows)
    if size < 1024:
        # Few steps: many programs an SM, so that one starts while another ends.
        return Tiling(WIDE if gated or rows <= 16 else 2 * WIDE, block_rows, 64, 4, 3)
    if gated:
        return Tiling(WIDE, block_rows, 64, 4, 4, tma=rows <= 16)
    if rows <= 32:
        return Tiling(WIDE, block_rows, 128, 4, 5 if rows <= 16 else 4)
    if out > 2 * NUM_SMS * WIDE:
        # Several waves: 3 programs an SM.
        return Tiling(WIDE, block_rows, 64, 4, 4)
    return Tiling(WIDE, block_rows, 128, 4, 5) if splits > 1 else Tiling(WIDE, block_rows, 64, 4, 8)


def _square(out: int, size: int, rows: int, *, gated: bool, splits: int) -> Tiling:
    """Multiplying is the cost: tiles as large as the registers hold, fetched by the copy engine."""
    if size < 1024:
        # Few steps: several programs an SM, so that one multiplies while another ends.
        return Tiling(WIDE if gated else 2 * WIDE, 128, 64, 4, 3, tma=True)
    if gated:
        if rows <= MAX_MEDIUM_ROWS:
            # Of one block of rows two programs an SM, each with less in flight.
            return Tiling(WIDE, 128, 64, 4, 3 if rows <= 128 else 5, tma=True)
        return Tiling(2 * WIDE, 128, 64, 8, 4, tma=True)
    if rows <= 128 and out < 2 * NUM_SMS * WIDE:
        return Tiling(WIDE, 128, 128, 4, 4, tma=True)
    if splits > 1:
        return Tiling(2 * WIDE, 128, 64, 8, 4, tma=True)
    if -(-out // (2 * WIDE)) * -(-rows // 256) < NUM_SMS:
        # Less than a wave of the largest tiles: three small programs an SM.
        return Tiling(WIDE, 128, 64, 4, 3, tma=True)
    if rows > MAX_MEDIUM_ROWS and out < 2 * NUM_SMS * WIDE:
        return Tiling(2 * WIDE, 128, 64, 8, 4, tma=True)
    return Tiling(2 * WIDE, 256, 64, 8, 4, tma=True)
