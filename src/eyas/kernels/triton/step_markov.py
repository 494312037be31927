"""Guesses that hear the guess before: one launch a depth, and one that turns all into ids.

A program holds a tile of `out` and a block of requests. It finds what its requests chose at the depth before
(the largest of all tiles' keys), forms their rows, multiplies, adds the logits and writes the tile's key. A
key is an int64 whose order is that of (logit, lower id), so that its maximum, in whatever order it is taken,
is the first of the largest logits.

A request's bits: R is cut by the weight alone, which also decides the instruction; the maximum is exact.

Legend: B requests, K depths, VOCAB draft ids, RANK and its power of two PADDED, P programs of a depth and
PARTS their power of two.
"""

# ruff: noqa: ANN001, ANN202 - bodies and arguments are Triton's, not Python's
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton import pdl
from eyas.kernels.triton.linear_short import _moved as _moved_by
from eyas.kernels.triton.pdl import EARLY, LATE, let_in, wait

LAST = tl.constexpr(2**31 - 1)
"""All bits of an id. A key ends in LAST - id, written id ^ LAST: of equal logits the lower id is larger."""
LEAST = tl.constexpr(-(2**63))

_PROGRAMS = 128
"""Of a depth, at most: less than a wave on an H100 or H200. Each reads a key of every one before it."""
_TILE_BYTES = 1 << 16
_MOST_HELD = 512
"""Of R at once: an SM has no room for a tile of more and its rows."""
_CHUNK = 64
"""Of R at a time where it is more: several chunks are on their way."""
_WIDE_CHUNK = 32
"""The same in float32, which no tensor core multiplies."""


@triton.jit
def _keys(value, column, VOCAB: tl.constexpr):
    """Logits float32 and their ids as keys; NaN counts as -inf, and what is past VOCAB loses to all ids."""
    value = tl.where((value == value) & (column < VOCAB), value, float("-inf"))  # noqa: PLR0124 - NaN
    # -0.0 equals 0.0.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ LAST, bits)
    return (ordered.to(tl.int64) << 32) + (column ^ LAST).to(tl.int64)


@triton.jit
def _id_of(key, VOCAB: tl.constexpr):
    """The id of a key; in range whatever the key is."""
    return tl.minimum(tl.maximum((key & LAST).to(tl.int32) ^ LAST, 0), VOCAB - 1)


@triton.jit
def _moved(x):
    """The same, to the compiler something new: what it does with it may not be moved before later loads."""
    return _moved_by(x, 32 // x.dtype.primitive_bitwidth)


@triton.jit
def _weights(
    out_ptr, column, first, VOCAB: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr
):
    """[columns, CHUNK] of `out`; zeros past its edges, which EXACT says are not met."""
    r = first + tl.arange(0, CHUNK)
    address = out_ptr + column[:, None] * RANK + r[None, :]
    if EXACT:
        return tl.load(address)
    else:  # noqa: RET505 - Triton follows one branch of a static if, not what comes after it
        return tl.load(address, mask=(column < VOCAB)[:, None] & (r < RANK)[None, :], other=0.0)


@triton.jit
def _pre(pre_ptr, place, there, first, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """What is added to the table's rows [requests, CHUNK]; zeros where there is none."""
    r = first + tl.arange(0, CHUNK)
    if pre_ptr is not None:
        address = pre_ptr + place[:, None] * RANK + r[None, :]
        return tl.load(address, mask=there[:, None] & (r < RANK)[None, :], other=0.0)
    else:  # noqa: RET505 - as above
        return tl.zeros([place.shape[0], CHUNK], tl.float32)


@triton.jit
def _from_table(table_ptr, chosen, there, first, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """The table's rows [requests, CHUNK]; zeros past R and past B."""
    r = first + tl.arange(0, CHUNK)
    address = table_ptr + chosen[:, None] * RANK + r[None, :]
    return tl.load(address, mask=there[:, None] & (r < RANK)[None, :], other=0.0)


@triton.jit
def _rows(pre, taken, SILU: tl.constexpr, TYPE: tl.constexpr):
    """act(pre + taken) as a right operand, TYPE [CHUNK, requests]."""
    row = pre.to(tl.float32) + taken.to(tl.float32)
    if SILU:
        row = row / (1 + tl.exp(-row))
    return row.to(TYPE).T


@triton.jit
def _logits(logits_ptr, place, column, there, VOCAB: tl.constexpr):
    """Uncorrected logits [columns, requests]."""
    address = logits_ptr + place[None, :] * VOCAB + column[:, None]
    mask = there[None, :] & (column < VOCAB)[:, None]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_requests", "depth"])
def markov_kernel(
    logits_ptr,
    pre_ptr,
    table_ptr,
    out_ptr,
    keys_ptr,
    num_requests,
    depth,
    NUM_DEPTHS: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    REQUESTS: tl.constexpr,
    SILU: tl.constexpr,
    FIRST: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Keys [depth, B, P] of one depth; FIRST: the depth that no guess stands before."""
    EXACT: tl.constexpr = P * BLOCK * STEPS == VOCAB and PADDED == RANK
    WHOLE: tl.constexpr = CHUNK == PADDED and not FIRST
    HELD: tl.constexpr = WHOLE and STEPS == 1
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    column = program * STEPS * BLOCK + tl.arange(0, BLOCK)
    request = tl.program_id(1) * REQUESTS + tl.arange(0, REQUESTS)
    there = request < num_requests
    place = request.to(tl.int64) * NUM_DEPTHS + depth
    keys = keys_ptr + depth.to(tl.int64) * num_requests * P + request.to(tl.int64) * P
    let_in(PDL, EARLY)
    if HELD:
        # What does not depend on the kernel before this one comes first.
        weight = _weights(out_ptr, column, 0, VOCAB, RANK, CHUNK, EXACT)
    wait(PDL)
    if not FIRST:
        other = tl.arange(0, PARTS)
        before = keys[:, None] - num_requests.to(tl.int64) * P + other[None, :]
        key = tl.load(before, mask=there[:, None] & (other < P)[None, :], other=LEAST)
    # All that can be asked for before the guess is known.
    if STEPS == 1:
        value = _logits(logits_ptr, place, column, there, VOCAB)
    if WHOLE:
        pre = _pre(pre_ptr, place, there, 0, RANK, CHUNK)
    if HELD and ORDERED:
        tl.debug_barrier()
    if not FIRST:
        chosen = _id_of(tl.max(key, axis=1), VOCAB)
    if WHOLE:
        taken = _from_table(table_ptr, chosen, there, 0, RANK, CHUNK)
    if STEPS == 1:
        # In 16 bits all that this depth reads is on its way: the next one may fetch its weights.
        let_in(PDL, LATE)
    if WHOLE:
        if HELD and ORDERED:
            # The others go to shared memory while the table's rows are on their way.
            weight, value = _moved(weight), _moved(value)
            if pre_ptr is not None:
                pre = _moved(pre)
        rows = _rows(pre, taken, SILU, TYPE)
    if STEPS == 1:
        value = value.to(tl.float32)
        if HELD:
            value += tl.dot(weight, rows, input_precision="ieee")
        elif not FIRST:
            value += _chunks(
                pre_ptr, table_ptr, out_ptr, chosen, place, there, column,
                VOCAB, RANK, PADDED, CHUNK, EXACT, SILU,
            )  # fmt: skip
        best = tl.max(_keys(value, column[:, None], VOCAB), axis=0)
    else:
        best = tl.full([REQUESTS], LEAST, tl.int64)
        for _ in range(STEPS):
            value = _logits(logits_ptr, place, column, there, VOCAB).to(tl.float32)
            if WHOLE:
                weight = _weights(out_ptr, column, 0, VOCAB, RANK, CHUNK, EXACT)
                value += tl.dot(weight, rows, input_precision="ieee")
            elif not FIRST:
                value += _chunks(
                    pre_ptr, table_ptr, out_ptr, chosen, place, there, column,
                    VOCAB, RANK, PADDED, CHUNK, EXACT, SILU,
                )  # fmt: skip
            best = tl.maximum(best, tl.max(_keys(value, column[:, None], VOCAB), axis=0))
            column += BLOCK
        let_in(PDL, LATE)
    tl.store(keys + program, best, mask=there)


@triton.jit
def _chunks(
    pre_ptr, table_ptr, out_ptr, chosen, place, there, column, VOCAB: tl.constexpr, RANK: tl.constexpr,
    PADDED: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The correction of a tile, CHUNK of R after CHUNK: float32 [columns, requests]."""
    acc = tl.zeros([column.shape[0], place.shape[0]], tl.float32)
    for first in range(0, PADDED, CHUNK):
        pre = _pre(pre_ptr, place, there, first, RANK, CHUNK)
        taken = _from_table(table_ptr, chosen, there, first, RANK, CHUNK)
        rows = _rows(pre, taken, SILU, out_ptr.dtype.element_ty)
        weight = _weights(out_ptr, column, first, VOCAB, RANK, CHUNK, EXACT)
        acc = tl.dot(weight, rows, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_requests"])
def markov_ids_kernel(
    keys_ptr,
    map_ptr,
    ids_ptr,
    num_requests,
    NUM_DEPTHS: tl.constexpr,
    VOCAB: tl.constexpr,
    P: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One guess of one request."""
    request, depth = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)
    let_in(PDL, EARLY)
    wait(PDL)
    keys = keys_ptr + (depth * num_requests + request) * P + part
    chosen = _id_of(tl.max(tl.load(keys, mask=part < P, other=LEAST), axis=0), VOCAB).to(tl.int64)
    if map_ptr is not None:
        chosen = tl.load(map_ptr + chosen)
    let_in(PDL, LATE)
    tl.store(ids_ptr + request * NUM_DEPTHS + depth, chosen)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one depth is cut. `block` and `chunk` decide bits and depend on the weight alone."""

    block: int
    """ids of a tile"""
    steps: int
    """tiles of a program, one after another"""
    chunk: int
    """of R in one product"""
    requests: int
    warps: int

    def programs(self, vocab: int) -> int:
        """Of a depth and a block of requests."""
        return -(-vocab // (self.block * self.steps))

    def constants(self, vocab: int, rank: int) -> dict[str, int]:
        """What the kernel of a depth is compiled for."""
        programs = self.programs(vocab)
        return {
            "VOCAB": vocab,
            "RANK": rank,
            "PADDED": _padded(rank),
            "CHUNK": self.chunk,
            "BLOCK": self.block,
            "STEPS": self.steps,
            "REQUESTS": self.requests,
            "P": programs,
            "PARTS": int(triton.next_power_of_2(programs)),
        }


@lru_cache(maxsize=1024)
def tiling(vocab: int, rank: int, itemsize: int, num_requests: int) -> Tiling:
    """The tiles of `out` [vocab, rank], itemsize bytes an element.

    Example: 14,848 ids of rank 128 in 16 bits -> 116 tiles of 128 ids, 32 KiB each.
    """
    padded = _padded(rank)
    chunk = padded if padded <= _MOST_HELD else _CHUNK
    block = 64
    while -(-vocab // block) > _PROGRAMS and block < 256 and 2 * block * chunk * itemsize <= _TILE_BYTES:
        block *= 2
    if -(-vocab // block) > _PROGRAMS and block * chunk * itemsize > _TILE_BYTES // 2:
        # Several tiles one after another, of which several are on their way.
        block //= 2
    steps = -(-vocab // (block * _PROGRAMS))
    warps = 8 if block * chunk * itemsize > _TILE_BYTES // 2 else 4
    if itemsize == 4:
        chunk = min(chunk, _WIDE_CHUNK)
    return Tiling(block, steps, chunk, 16 if num_requests <= 16 else 32, warps)


def _padded(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def markov_guess(
    logits: Tensor,
    pre: Tensor | None,
    table: Tensor,
    out: Tensor,
    index_map: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """See eyas.kernels.reference.step_markov.markov_guess."""
    tiles = tiling(*out.shape, out.element_size(), logits.shape[0])
    return launch(tiles, logits, pre, table, out, index_map, silu=silu)


def launch(
    tiles: Tiling,
    logits: Tensor,
    pre: Tensor | None,
    table: Tensor,
    out: Tensor,
    index_map: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """As markov_guess, cut as `tiles` says."""
    num_requests, num_depths, vocab = logits.shape
    ids = torch.empty(num_requests, num_depths, dtype=torch.int64, device=logits.device)
    if not ids.numel():
        return ids
    keys = keys_of_depths(tiles, logits, pre, table, out, silu=silu)
    markov_ids_kernel[(num_requests, num_depths)](
        keys,
        index_map,
        ids,
        num_requests,
        NUM_DEPTHS=num_depths,
        VOCAB=vocab,
        P=keys.shape[2],
        PARTS=triton.next_power_of_2(keys.shape[2]),
        num_warps=1,
        **pdl.options(small=True),
    )
    return ids


def keys_of_depths(
    tiles: Tiling, logits: Tensor, pre: Tensor | None, table: Tensor, out: Tensor, *, silu: bool
) -> Tensor:
    """The largest key of each program, int64 [K, B, P]: all bits of its logit, and the id."""
    num_requests, num_depths, vocab = logits.shape
    # A weight that is copied here is written by the kernel before: there is nothing to ask for early.
    own, out = out.is_contiguous(), out.contiguous()
    logits, table = logits.contiguous(), table.contiguous()
    pre = None if pre is None else pre.contiguous()
    programs = tiles.programs(vocab)
    keys = torch.empty(num_depths, num_requests, programs, dtype=torch.int64, device=logits.device)
    for depth in range(num_depths):
        markov_kernel[(programs, triton.cdiv(num_requests, tiles.requests))](
            logits,
            pre,
            table,
            out,
            keys,
            num_requests,
            depth,
            **tiles.constants(vocab, out.shape[1]),
            NUM_DEPTHS=num_depths,
            SILU=silu,
            FIRST=depth == 0,
            ORDERED=logits.is_cuda,
            num_warps=tiles.warps,
            enable_fp_fusion=False,
            **pdl.options(small=True, own=own),
        )
    return keys
