"""Batch-invariant matrix products with fused bias, residual, SiLU and argmax (linear_kernels.py).

The norm before a product is a launch of its own, except where launches are the cost (linear_short.py, whose
bits more rows get from linear_parts.py).

Any number of rows; the same bits for a row whatever the others are. 16-bit types multiply on tensor cores
and add in float32; float32 multiplies exactly as float32 (slow: for tests).
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eyas.kernels.settings import settings
from eyas.kernels.triton import linear_kernels as kernels
from eyas.kernels.triton import pdl
from eyas.kernels.triton.linear_parts import parts_kernel
from eyas.kernels.triton.linear_short import short_kernel
from eyas.kernels.triton.linear_tiling import NUM_SMS, Tiling, tiling
from eyas.kernels.triton.norm import rms_norm, sum_norm

_COUNTERS = 1 << 18
"""Arrivals that are counted at the same time at most; a step of an 8B model counts 4,096."""
_LINE: int = kernels.LINE.value
"""16-bit weights of a cache line."""
_counters: dict[torch.device, Tensor] = {}
_next_counter = 0


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    live: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """See eyas.kernels.reference.linear.linear."""
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows = _rows(x)
    if len(rows):
        tiles = tiling(weight.shape[0], weight.shape[1], len(rows))
        launch(
            tiles,
            rows,
            weight,
            out,
            bias=bias,
            norm_weight=norm_weight,
            eps=eps,
            residual=residual,
            live=live,
            also=_flat(also),
        )
    return out


def linear_norm(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    live: Tensor | None = None,
    also: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See eyas.kernels.reference.linear.linear_norm. Normed where parallel K-splits leave their sum to it."""
    rows, width = _rows(x), weight.shape[0]
    tiles = tiling(width, weight.shape[1], len(rows)) if len(rows) else None
    if tiles is None or not tiles.parallel or tiles.parts:
        return linear(x, weight, residual=residual, live=live, also=also), None
    parts = torch.empty(tiles.splits, len(rows), width, dtype=torch.float32, device=x.device)
    launch(tiles, rows, weight, parts, live=live, summed=False)
    hidden, normed = sum_norm(parts, residual.reshape(-1, width), norm_weight, eps, live, _flat(also))
    return hidden.view(residual.shape), normed.view(residual.shape)


def gated_linear(
    x: Tensor,
    gate_up_weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    live: Tensor | None = None,
) -> Tensor:
    """See eyas.kernels.reference.linear.gated_linear."""
    half, size = gate_up_weight.shape[0] // 2, gate_up_weight.shape[1]
    out = x.new_empty(*x.shape[:-1], half)
    rows = _rows(x)
    if len(rows):
        tiles = tiling(half, size, len(rows), gated=True)
        launch(tiles, rows, gate_up_weight, out, norm_weight=norm_weight, eps=eps, gated=True, live=live)
    return out


def max_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    index_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See eyas.kernels.reference.linear.max_linear."""
    largest, ids = x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)
    rows = _rows(x)
    if len(rows):
        tiles = tiling(weight.shape[0], weight.shape[1], len(rows), head=True)
        launch_max(tiles, rows, weight, largest, ids, norm_weight=norm_weight, eps=eps, index_map=index_map)
    return largest, ids


def launch(
    tiles: Tiling,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    live: Tensor | None = None,
    also: Tensor | None = None,
    summed: bool = True,
) -> None:
    """Compute x [T, K] @ weight^T into `out` and `also`, cut as `tiles` says; `live`: see the reference.

    With `summed` off `out` is float32 [splits, T, width]: parallel splits that somebody else adds.
    """
    assert tiles.splits == 1 or not gated, "a K-split has no gate to put through SiLU"
    rows, size = x.shape
    width = out.shape[-1]
    residual = None if residual is None else residual.contiguous()
    also_stride = None if also is None else also.stride(0)
    # A weight that is copied here is written by the kernel before: there is nothing to ask for early.
    own, weight = weight.is_contiguous(), weight.contiguous()
    if tiles.parts and tiles.parallel:
        grid = (triton.cdiv(width, tiles.block_out), triton.cdiv(rows, tiles.block_rows))
        short_kernel[grid](
            x,
            weight,
            bias,
            norm_weight,
            residual,
            out,
            also,
            rows,
            x.stride(0),
            also_stride,
            eps,
            OUT=width,
            K=size,
            BLOCK_OUT=tiles.block_out,
            BLOCK_ROWS=tiles.block_rows,
            PARTS=tiles.parts,
            GATED=gated,
            ORDERED=x.is_cuda,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=False,
            **pdl.options(small=True, own=own),
        )
        return
    x = _normed(x, norm_weight, eps, live)
    programs = triton.cdiv(width, tiles.block_out) * triton.cdiv(rows, tiles.block_rows)
    # The count is a kernel's: nothing is asked for before it is there.
    asks = own and live is None
    if tiles.parts:
        parts_kernel[(programs,)](
            x,
            weight,
            bias,
            residual,
            out,
            live,
            also,
            rows,
            x.stride(0),
            also_stride,
            OUT=width,
            K=size,
            BLOCK_OUT=tiles.block_out,
            BLOCK_ROWS=tiles.block_rows,
            PARTS=tiles.parts,
            GATED=gated,
            ORDERED=x.is_cuda,
            PREFETCH=_lines(tiles, x, weight, programs) if asks else 0,
            **_options(tiles, own=own),
        )
        return
    partial = arrived = None
    if not summed:
        partial = out
    elif tiles.parallel:
        partial = x.new_empty(
            tiles.splits * programs * tiles.block_out * tiles.block_rows, dtype=torch.float32
        )
        arrived = _take_counters(x.device, programs)
    kernels.linear_kernel[(programs, tiles.splits if tiles.parallel else 1)](
        *_operands(tiles, x, weight),
        bias,
        residual,
        out,
        partial,
        arrived,
        live,
        also,
        rows,
        x.stride(0),
        also_stride,
        OUT=width,
        K=size,
        BLOCK_OUT=tiles.block_out,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_K=tiles.block_k,
        SPLITS=tiles.splits,
        LENGTH=tiles.length(size),
        PARALLEL=tiles.parallel,
        GATED=gated,
        TMA=_uses_tma(tiles, x, weight),
        PREFETCH=_lines(tiles, x, weight, programs * (tiles.splits if tiles.parallel else 1)) if asks else 0,
        **_options(tiles, own=own),
    )


def launch_max(
    tiles: Tiling,
    x: Tensor,
    weight: Tensor,
    largest: Tensor,
    ids: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    index_map: Tensor | None = None,
) -> None:
    """Write the largest of x [T, K] @ weight^T in every row, and its id, cut as `tiles` says."""
    assert tiles.splits == 1, "an output matrix is wide enough without K-splits"
    own, weight = weight.is_contiguous(), weight.contiguous()
    rows, size = x.shape
    width = weight.shape[0]
    x = _normed(x, norm_weight, eps)
    num_tiles = triton.cdiv(width, tiles.block_out)
    values = x.new_empty(rows, num_tiles)
    indices = x.new_empty(rows, num_tiles, dtype=torch.int32)
    programs = num_tiles * triton.cdiv(rows, tiles.block_rows)
    kernels.max_kernel[(programs,)](
        *_operands(tiles, x, weight),
        values,
        indices,
        rows,
        x.stride(0),
        OUT=width,
        K=size,
        BLOCK_OUT=tiles.block_out,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_K=tiles.block_k,
        TMA=_uses_tma(tiles, x, weight),
        PREFETCH=_lines(tiles, x, weight, programs) if own else 0,
        **_options(tiles, own=own),
    )
    kernels.max_of_tiles_kernel[(rows,)](
        values,
        indices,
        index_map,
        largest,
        ids,
        num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        enable_fp_fusion=False,
        **pdl.options(small=True),
    )


def _rows(x: Tensor) -> Tensor:
    """X [..., K] as [T, K] whose rows are contiguous and aligned: other loads would be another kernel."""
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) == 1 and _is_aligned(flat):
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


def _flat(also: Tensor | None) -> Tensor | None:
    """`also` [..., N] as the [T, N] it is a view of: a copy would be written in vain, and is an error."""
    return None if also is None else also.view(-1, also.shape[-1])


def _is_aligned(matrix: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _normed(x: Tensor, norm_weight: Tensor | None, eps: float, live: Tensor | None = None) -> Tensor:
    return x if norm_weight is None else rms_norm(x, norm_weight, eps, live)


def _uses_tma(tiles: Tiling, x: Tensor, weight: Tensor) -> bool:
    return tiles.tma and _is_aligned(x) and _is_aligned(weight)


def _operands(tiles: Tiling, x: Tensor, weight: Tensor) -> tuple[Any, Any]:
    """X and weight as the kernel reads them: tensors, or descriptors for the copy engine."""
    if not _uses_tma(tiles, x, weight):
        return x, weight
    return (
        TensorDescriptor.from_tensor(x, [tiles.block_rows, tiles.block_k]),
        TensorDescriptor.from_tensor(weight, [tiles.block_out, tiles.block_k]),
    )


def _options(tiles: Tiling, *, own: bool) -> dict[str, int | bool]:
    """Launch options. Multiply-adds are not contracted, so that every variant rounds alike."""
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
    return options | pdl.options(small=False, own=own)


def _lines(tiles: Tiling, x: Tensor, weight: Tensor, programs: int) -> int:
    """Cache lines of each weight row that a program asks L2 for while it waits; a power of two, or 0.

    early: up to 16, all of a short row. auto: what its own first loads would ask for, in the first wave.
    """
    if not pdl.asks() or _uses_tma(tiles, x, weight):
        return 0
    lines = min(int(triton.next_power_of_2(triton.cdiv(x.shape[1] // tiles.splits, _LINE))), 16)
    if settings.pdl == "early" or tiles.parts:
        return lines
    if programs > 2 * NUM_SMS:
        return 0
    depth = tiles.block_k * (tiles.stages - 1) // _LINE
    return min(lines, 1 << max(depth.bit_length() - 1, 0))


def _take_counters(device: torch.device, count: int) -> Tensor:
    """The next `count` zeros of a ring. The last arrival puts zeros back.

    Launches that may run at the same time (two streams, or a kernel that starts early) get different ones.
    The ring is made by the first call, which must not stand in a CUDA graph (warm-up comes first).
    """
    global _next_counter  # noqa: PLW0603 - one ring a process
    ring = _counters.get(device)
    if ring is None:
        ring = _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    if _next_counter + count > _COUNTERS:
        _next_counter = 0
    taken = ring[_next_counter : _next_counter + count]
    _next_counter += count
    return taken
