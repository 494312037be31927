"""How paged attention is cut up. `unit` and CHUNK decide a row's bits; nothing else does."""

from dataclasses import dataclass

import torch
import triton

CHUNK = 256
"""Keys whose states are summed before they join the others; a multiple of every unit."""
MOST_ROTATED = 16
"""Rows of a request up to which attention rotates and caches them itself."""
MOST_FOLDED = 32
"""States whose loads are under way together where they are folded from memory."""
WAVES_OF_UNITS = 3
"""Programs a processor up to which each takes a unit of keys 128 wide, or two of keys 64 wide."""
WAVES_OF_WALKS = 1.4
"""Tiles a processor from which on a program walks all keys of its tile."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Shape of one launch; all give the same bits. Raises ValueError for fewer than two stages."""

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


def folded_together(state: int, max_states: int, width: int) -> int:
    """States of `state` keys that are folded at once: whole chunks, as many as there can be, a power of two.

    Example, 128 wide: 8 chunks at most -> 8; 40 units at most -> 32; 1 unit -> the 4 of its chunk.
    """
    # A warp's registers hold 32 states 128 wide.
    most = min(MOST_FOLDED, MOST_FOLDED * 128 // width)
    return max(min(most, int(triton.next_power_of_2(max_states))), CHUNK // state)


def choose(
    requests: int, kv_heads: int, pairs: int, bound: int, dtype: torch.dtype, head_dim: int, processors: int
) -> Plan:
    """Plan for `pairs` (row, head of a group) of each request and at most `bound` keys.

    Few keys: a program a unit, so that all are on their way at once. More: a program a chunk, or a few
    chunks, because a state costs as much to store and fold as a few keys to read. Tiles enough to fill the
    device: each program walks its keys alone, stores no state, and nothing is folded.
    """
    keys = unit(dtype)
    block_m = 16 if dtype == torch.float32 or pairs <= 16 else 32
    tiles = requests * kv_heads * triton.cdiv(pairs, block_m)
    units, chunks = max(triton.cdiv(bound, keys), 1), max(triton.cdiv(bound, CHUNK), 1)
    if tiles * units * head_dim <= WAVES_OF_UNITS * 128 * processors:
        return Plan(block_m, keys, units, 4, 2)
    stages = 3 if head_dim <= 128 else 2
    if tiles >= WAVES_OF_WALKS * processors:
        return Plan(block_m, 0, 1, 4, stages)
    # A wave of two programs a processor: a last chunk of a few keys would start another.
    return Plan(block_m, CHUNK, min(chunks, max(2 * processors // tiles, 1)), 4, stages)
