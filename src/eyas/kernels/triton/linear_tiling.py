"""Tile shapes of the matrix products: one table, chosen by the weight's shape and the number of rows.

What decides a row's bits (`splits`, `block_k`, and whether the tile is 64 or more weights wide, which is
what picks the tensor core instruction) depends on the weight alone. The rest may depend on the rows.
"""

from dataclasses import dataclass
from functools import lru_cache

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
    lanes: int
    """of the norm's sum of squares; the norm can be in the loop where block_k is the same"""
    norm_in_loop: bool
    """norm inside the product instead of in a pass before it"""
    tma: bool = False
    """tiles fetched by the copy engine (Hopper), which spares the threads their addresses"""


@lru_cache(maxsize=4096)
def tiling(out: int, size: int, rows: int, *, gated: bool = False) -> Tiling:
    """The tiles of rows [rows, size] x weight [out, size]; `out` of one half if gated.

    Example: out 4096, size 4096, rows 8 -> 64 tiles of 64 weights in 2 K-splits, 128 programs on 132 SMs.
    """
    weights = out * (2 if gated else 1)
    small = weights < 60 * WIDE
    # 64 divides what 128 does not (576 of a 135M model), and a short K needs many small steps in flight.
    lanes = 64 if small or size % 128 else 128
    # With less than a wave of wide tiles K is shared out, unless it is short: meeting costs a microsecond.
    splits = 2 if size >= 2048 and weights < 80 * WIDE and not gated else 1
    fitting = max(16, 1 << (rows - 1).bit_length())
    skinny = rows <= MAX_SKINNY_ROWS
    if small:
        # Launches and latency are the cost: more programs than wide tiles give, all of K in flight.
        block_out = 16 if weights <= 16 * NUM_SMS and rows <= 16 else 32
        block_rows, block_k, warps, stages = min(fitting, 64), lanes, 4, 6 if skinny else 4
    elif rows <= 128:
        block_out, block_rows, block_k, warps = WIDE, fitting, lanes, 4
        # As many as fit in the shared memory of an SM, at 1 program each.
        stages = (4 if rows <= 64 else 3) if gated else (5 if rows <= 16 else 4)
    else:
        block_out, block_rows, block_k, warps, stages = (WIDE if gated else 2 * WIDE), 128, 64, 8, 4
    programs = -(-out // block_out) * -(-rows // block_rows)
    return Tiling(
        block_out=block_out,
        block_rows=block_rows,
        block_k=block_k,
        splits=splits,
        # Side by side where there are SMs for it.
        parallel=splits > 1 and programs * splits <= NUM_SMS,
        warps=warps,
        stages=stages,
        lanes=lanes,
        # In the loop every program norms its activations again, which more rows make dearer than a launch.
        norm_in_loop=skinny if small else rows <= 16,
    )
