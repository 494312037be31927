"""Weights that the next kernel reads, brought to L2 by kernels that leave the memory idle.

A norm that sums parts and the fold of attention's states read little, and what they read is in L2 already:
two to four microseconds in which the memory could have sent ten megabytes. So every thread asks the copy
engine for its share of a weight, and nobody waits for it. No kernel of a step writes weights: this may
come before `pdl.wait`.
"""

# ruff: noqa: ANN001 - bodies and arguments are Triton's, not Python's
import os

import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.triton.pdl import can_bulk

FOLD_BYTES = int(os.environ.get("EYAS_FOLD_SOON", str(16 << 20)))
"""Of the output projection, that the fold of attention asks for."""
NORM_BYTES = int(os.environ.get("EYAS_NORM_SOON", str(8 << 20)))
"""Of the product after it, that a norm asks for."""


@triton.jit
def ask(weight_ptr, share, program, LANES: tl.constexpr) -> None:
    """Ask L2 for bytes [lane * share, (lane + 1) * share) of a weight; LANES threads a program.

    Example, share 4096, 64 lanes: lane 3 of program 2 asks for the 131st 4 KB. share: a multiple of 16.
    """
    lane = program.to(tl.int64) * LANES + tl.arange(0, LANES)
    address = weight_ptr.to(tl.int64, bitcast=True) + lane * share
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.zeros_like(lane).to(tl.int32) + share],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def share_of(weight: Tensor | None, most: int, lanes: int) -> tuple[Tensor | None, int]:
    """(weight, bytes a lane), for `lanes` threads to ask for `most` bytes at most; (None, 0): nobody asks.

    Example: 32 MiB weight, most 16 MiB, 65,536 lanes -> 256 bytes each.
    """
    if weight is None or not weight.is_contiguous() or not can_bulk(weight.device):
        return None, 0
    size = min(weight.numel() * weight.element_size(), most) // lanes // 16 * 16
    return (weight, size) if size else (None, 0)
