"""How paged attention is cut up. `unit` and CHUNK decide a row's bits; nothing of a Plan does."""

from dataclasses import dataclass

import torch
import triton

CHUNK = 256
"""Keys whose states are summed before they join the others; a multiple of every unit."""
MOST_ROTATED = 16
"""Rows of a request up to which attention rotates and caches them itself."""
MOST_STORED = 256
"""Pairs of a request up to which states are stored for any number of tiles: they are small beside keys."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of one launch. Every plan gives the same bits. Raises ValueError for fewer than two stages."""

    block_m: int
    """Pairs of a tile."""
    state: int
    """Keys of a stored state: a unit, a chunk, or 0 (no state, a program walks)."""
    splits: int
    """Programs that share a tile's states."""
    warps: int
    stages: int
    """Units whose loads are under way at the same time, where a program has several; two at least."""

    def __post_init__(self) -> None:
        # With one stage Triton puts a unit's weights where its keys were. ptxas 12.8, which Triton 3.6
        # brings, then takes their address from a register that holds something else, and the second
        # product reads elsewhere: wrong sums or an illegal access. tests/kernels/wgmma_descriptors.py
        # finds it in the machine code.
        if self.stages < 2:
            message = f"{self.stages} stage: ptxas 12.8 miscompiles unpipelined attention; take 2 or more"
            raise ValueError(message)


def unit(dtype: torch.dtype) -> int:
    """Keys of a unit: those of one tile in registers."""
    return 32 if dtype == torch.float32 else 64


def choose(
    requests: int, kv_heads: int, pairs: int, bound: int, dtype: torch.dtype, head_dim: int, processors: int
) -> Plan:
    """Plan for `pairs` (row, head of a group) of each request and at most `bound` keys.

    Few tiles: a program a unit, so that all keys are on their way at once. More: a program a chunk, or a
    few chunks. Whole prompts: each program walks alone and stores no state.
    """
    keys = unit(dtype)
    block_m = 16 if pairs <= 16 or dtype == torch.float32 else 32
    tiles = requests * kv_heads * triton.cdiv(pairs, block_m)
    units, chunks = max(triton.cdiv(bound, keys), 1), max(triton.cdiv(bound, CHUNK), 1)
    if tiles * units <= 8 * processors:
        return Plan(block_m, keys, units, 4, 2)
    if tiles >= 3 * processors and pairs > MOST_STORED:
        return Plan(block_m, 0, 1, 4, 3 if head_dim <= 128 else 2)
    splits = min(chunks, max(4 * processors // tiles, 1))
    return Plan(block_m, CHUNK, splits, 4, 3 if head_dim <= 128 else 2)
