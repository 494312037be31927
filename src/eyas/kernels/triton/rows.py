"""Fields of a forward's rows in one launch; one lane a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.reference.rows import Rows

_BLOCK = 128


@triton.jit
def packed_before(counts_ptr, request, num_requests, REQUESTS: tl.constexpr):  # noqa: ANN001, ANN201
    """Rows that count of the requests before request [N], and of all; REQUESTS: a power of two, B or more."""
    other = tl.arange(0, REQUESTS)
    counts = tl.load(counts_ptr + other, mask=other < num_requests, other=0).to(tl.int32)
    before = tl.sum(tl.where(other[None, :] < request[:, None], counts[None, :], 0), 1)
    return before, tl.sum(counts)


@triton.jit
def _rows_kernel(  # noqa: ANN202
    start_ptr,  # noqa: ANN001
    counts_ptr,  # noqa: ANN001
    depths_ptr,  # noqa: ANN001
    bits_ptr,  # noqa: ANN001
    page_table_ptr,  # noqa: ANN001
    positions_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    visible_ptr,  # noqa: ANN001
    q_start_ptr,  # noqa: ANN001
    bits_out_ptr,  # noqa: ANN001
    num_requests,  # noqa: ANN001
    rows,  # noqa: ANN001
    first,  # noqa: ANN001
    num_pages,  # noqa: ANN001
    page_stride,  # noqa: ANN001
    page_size,  # noqa: ANN001
    max_position,  # noqa: ANN001
    HAS_TREE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < num_requests * rows
    request, row = lane // rows, lane % rows
    place = lane
    # Lanes are as many as rows and one more, or as requests and one more: q_start has B + 1 entries.
    if REQUESTS > 0:
        counts, total = packed_before(counts_ptr, request, num_requests, REQUESTS)
        count = tl.load(counts_ptr + request, mask=live, other=0).to(tl.int32)
        # Past all that count come the others, in their own order.
        place = tl.where(row < count, counts + row, total + request * rows - counts + row - count)
        starts, _ = packed_before(counts_ptr, lane, num_requests, REQUESTS)
        tl.store(q_start_ptr + lane, starts, mask=lane <= num_requests)
    else:
        tl.store(q_start_ptr + lane, lane * rows, mask=lane <= num_requests)
    start = tl.load(start_ptr + request, mask=live, other=0)
    index = start + first + row
    valid = live & (index < max_position)
    if HAS_TREE:
        position = start + tl.load(depths_ptr + lane, mask=live, other=0)
        visible = tl.where(valid, start, 0)
        bits = tl.load(bits_ptr + lane, mask=valid, other=0)
        tl.store(bits_out_ptr + lane, bits, mask=live)
    else:
        valid &= row < tl.load(counts_ptr + request, mask=live, other=0)
        position = index
        visible = tl.where(valid, index + 1, 0)
    page_index = index // page_size
    paged = valid & (index >= 0) & (page_index < num_pages)
    page = tl.load(page_table_ptr + request * page_stride + page_index, mask=paged, other=0).to(tl.int64)
    slot = tl.where(paged, page * page_size + index % page_size, -1)
    tl.store(positions_ptr + place, position, mask=live)
    tl.store(slots_ptr + place, slot, mask=live)
    tl.store(visible_ptr + place, visible.to(tl.int32), mask=live)


def chain_rows(
    start: Tensor,
    counts: Tensor,
    page_table: Tensor,
    rows: int,
    page_size: int,
    max_position: int,
    *,
    packed: bool = False,
) -> Rows:
    """See eyas.kernels.reference.rows.chain_rows."""
    return _launch(start, counts, None, page_table, rows, 0, page_size, max_position, packed=packed)


def tree_rows(
    start: Tensor,
    depths: Tensor,
    bits: Tensor,
    page_table: Tensor,
    first: int,
    page_size: int,
    max_position: int,
) -> Rows:
    """See eyas.kernels.reference.rows.tree_rows."""
    trees = (depths.contiguous(), bits.contiguous())
    return _launch(start, start, trees, page_table, depths.shape[1], first, page_size, max_position)


def _launch(
    start: Tensor,
    counts: Tensor,
    trees: tuple[Tensor, Tensor] | None,
    page_table: Tensor,
    rows: int,
    first: int,
    page_size: int,
    max_position: int,
    *,
    packed: bool = False,
) -> Rows:
    num_requests = start.shape[0]
    positions = start.new_empty(num_requests * rows)
    slots = torch.empty_like(positions)
    visible = torch.empty_like(positions, dtype=torch.int32)
    q_start = torch.empty(num_requests + 1, dtype=torch.int32, device=start.device)
    bits = torch.empty_like(positions) if trees is not None else None
    lanes = max(num_requests * rows, num_requests + 1)
    _rows_kernel[(triton.cdiv(lanes, 32 if packed else _BLOCK),)](
        start.contiguous(),
        counts.contiguous(),
        trees[0] if trees is not None else start,
        trees[1] if trees is not None else start,
        page_table,
        positions,
        slots,
        visible,
        q_start,
        bits if bits is not None else positions,
        num_requests,
        rows,
        first,
        page_table.shape[1],
        page_table.stride(0),
        page_size,
        max_position,
        HAS_TREE=trees is not None,
        REQUESTS=triton.next_power_of_2(num_requests) if packed else 0,
        BLOCK=32 if packed else _BLOCK,
    )
    return Rows(positions, slots, visible, q_start, bits)
