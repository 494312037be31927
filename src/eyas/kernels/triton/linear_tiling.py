"""Tile shapes of the matrix products: one table, chosen by the weight's shape and the number of rows.

What decides a row's bits (`splits`, `block_k`, and whether the tile is 64 or more weights wide, which is
what picks the tensor core instruction) depends on the weight alone. The rest may depend on the rows.
"""

from dataclasses import dataclass

NUM_SMS = 132
"""Of an H100 or H200. The table may not ask the device: the bits would change with it."""
WIDE = 64
"""Weights that the warp-group instructions of Hopper take at once."""
MAX_SKINNY_ROWS = 64
"""Up to here reading the weights is the cost; past it, multiplying."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one product is cut."""

    block_out: int
    """weights of a tile; of gate and of up each, where there are two"""
    block_rows: int
    block_k: int
    splits: int
    """parts of K that are summed apart and added in order"""
    parallel: bool
    """whether the splits run in programs of their own"""
    warps: int
    stages: int
    """tiles in flight"""
    norm_in_loop: bool
    """norm inside the product instead of in a pass before it"""


def tiling(out: int, size: int, rows: int, *, gated: bool = False) -> Tiling:
    """The tiles of rows [rows, size] x weight [out, size]; `out` of one half if gated.

    Example: out 4096, size 4096, rows 8 -> 64 tiles of 64 weights in 2 K-splits, 128 programs on 132 SMs.
    """
    halves = 2 if gated else 1
    few_tiles = out * halves < 60 * WIDE
    # 64 divides what 128 does not (576 of a 135M model), and a short K needs many small steps in flight.
    block_k = 128 if size % 128 == 0 and not few_tiles else 64
    # Below a wave of wide tiles, K is shared out; short rows are not worth the meeting.
    splits = 2 if size >= 2048 and out * halves < 80 * WIDE else 1
    skinny = rows <= MAX_SKINNY_ROWS
    block_rows = max(16, 1 << (min(rows, 128) - 1).bit_length())
    if few_tiles:
        # Launches and latency are the cost: more programs than wide tiles give, all of K in flight.
        narrow = 16 if out * halves <= 16 * NUM_SMS and rows <= 16 else 32
        return Tiling(
            block_out=narrow,
            block_rows=min(block_rows, MAX_SKINNY_ROWS),
            block_k=block_k,
            splits=splits,
            parallel=skinny and splits > 1,
            warps=4,
            stages=6 if skinny else 4,
            norm_in_loop=skinny,
        )
    if skinny:
        return Tiling(
            block_out=WIDE,
            block_rows=block_rows,
            block_k=block_k,
            splits=splits,
            parallel=splits > 1,
            warps=4,
            stages=4 if gated or rows > 16 else 5,
            norm_in_loop=rows <= 16,
        )
    return Tiling(
        block_out=WIDE if gated else 2 * WIDE,
        block_rows=128,
        block_k=block_k,
        splits=splits,
        parallel=False,
        warps=8,
        stages=3,
        norm_in_loop=False,
    )
