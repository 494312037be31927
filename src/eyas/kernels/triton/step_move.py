"""Move accepted tree nodes on all layers in one launch; a program a request, layer and block of columns.

A program moves its columns node by node. Rows of a path ascend (nodes[d] >= d, and more than nodes[d - 1]),
so the goal of a node is never the source of a later one, and what was read need not be kept.
"""

from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _move_kernel(  # noqa: ANN202
    keys_ptr,  # noqa: ANN001
    values_ptr,  # noqa: ANN001
    page_table_ptr,  # noqa: ANN001
    start_ptr,  # noqa: ANN001
    nodes_ptr,  # noqa: ANN001
    counts_ptr,  # noqa: ANN001
    layer_stride,  # noqa: ANN001
    page_stride,  # noqa: ANN001
    num_pages,  # noqa: ANN001
    size,  # noqa: ANN001
    page_size,  # noqa: ANN001
    max_position,  # noqa: ANN001
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    start = tl.load(start_ptr + request)
    count = tl.load(counts_ptr + request)
    pages = page_table_ptr + request * page_stride
    keys = keys_ptr + layer * layer_stride + column
    values = values_ptr + layer * layer_stride + column
    for depth in range(1, DEPTHS):
        node = tl.load(nodes_ptr + request * DEPTHS + depth)
        goal, index = start + depth, start + node
        moves = (depth < count) & (node != depth) & (goal < max_position) & (index < num_pages * page_size)
        page = tl.load(pages + index // page_size, mask=moves, other=0).to(tl.int64)
        source = (page * page_size + index % page_size) * size
        page = tl.load(pages + goal // page_size, mask=moves, other=0).to(tl.int64)
        target = (page * page_size + goal % page_size) * size
        mask = inside & moves
        key = tl.load(keys + source, mask=mask)
        value = tl.load(values + source, mask=mask)
        tl.store(keys + target, key, mask=mask)
        tl.store(values + target, value, mask=mask)


def move_nodes(
    keys: list[Tensor],
    values: list[Tensor],
    page_table: Tensor,
    start: Tensor,
    nodes: Tensor,
    counts: Tensor,
    max_position: int,
) -> None:
    """See eyas.kernels.reference.step_move.move_nodes."""
    size, page_size = keys[0].shape[2] * keys[0].shape[3], keys[0].shape[1]
    block = min(1024, triton.next_power_of_2(size))
    stride = _layer_stride(keys, values)
    # A launch for all layers where they stand at even distances, else one for each.
    groups = [(keys[0], values[0])] if stride is not None else list(zip(keys, values, strict=True))
    for first_keys, first_values in groups:
        _move_kernel[(start.shape[0], len(keys) // len(groups), triton.cdiv(size, block))](
            first_keys,
            first_values,
            page_table,
            start,
            nodes.contiguous(),
            counts,
            stride or 0,
            page_table.stride(0),
            page_table.shape[1],
            size,
            page_size,
            max_position,
            DEPTHS=nodes.shape[1],
            BLOCK=block,
            num_warps=4,
        )


def _layer_stride(keys: list[Tensor], values: list[Tensor]) -> int | None:
    """Elements from each layer to the next, if keys and values are slices of one tensor each; else None."""
    steps: set[int] = set()
    for tensors in (keys, values):
        if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
            return None
        offsets = [int(tensor.storage_offset()) for tensor in tensors]
        steps |= {late - early for early, late in pairwise(offsets)}
    return steps.pop() if len(steps) == 1 else 0 if not steps else None
