"""Shapes and paths of draft trees, one program a tree; rows look each other up by comparing all with all."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pick(values, index, row):  # noqa: ANN001, ANN202
    """values[index], both [BLOCK]: at most 64 rows, so a product with ones and zeros does for a gather."""
    return tl.sum(tl.where(index[:, None] == row[None, :], values[None, :], 0), 1)


@triton.jit
def _shape_kernel(  # noqa: ANN202
    draft_parents_ptr,  # noqa: ANN001
    parents_ptr,  # noqa: ANN001
    depths_ptr,  # noqa: ANN001
    bits_ptr,  # noqa: ANN001
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK).to(tl.int64)
    is_node = (row > 0) & (row < ROWS)
    parents = tl.load(draft_parents_ptr + request * (ROWS - 1) + row - 1, mask=is_node, other=0)
    above = parents
    depths = is_node.to(tl.int64)
    bits = tl.full([BLOCK], 1, tl.int64) << row
    for _ in tl.static_range(ROUNDS):
        bits |= _pick(bits, above, row)
        depths += _pick(depths, above, row)
        above = _pick(above, above, row)
    where = request * ROWS + row
    tl.store(parents_ptr + where, parents, mask=row < ROWS)
    tl.store(depths_ptr + where, depths, mask=row < ROWS)
    tl.store(bits_ptr + where, bits, mask=row < ROWS)


def tree_shape(draft_parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See eyas.kernels.reference.step_tree.tree_shape."""
    num_requests, num_drafts = draft_parents.shape
    rows = num_drafts + 1
    parents, depths, bits = (draft_parents.new_empty(num_requests, rows) for _ in range(3))
    _shape_kernel[(num_requests,)](
        draft_parents.contiguous(),
        parents,
        depths,
        bits,
        ROWS=rows,
        ROUNDS=max_depth.bit_length(),
        BLOCK=max(16, triton.next_power_of_2(rows)),
        num_warps=4,
    )
    return parents, depths, bits


@triton.jit
def _path_kernel(  # noqa: ANN202
    choices_ptr,  # noqa: ANN001
    tokens_ptr,  # noqa: ANN001
    parents_ptr,  # noqa: ANN001
    depths_ptr,  # noqa: ANN001
    bits_ptr,  # noqa: ANN001
    tokens_out,  # noqa: ANN001
    counts_out,  # noqa: ANN001
    nodes_out,  # noqa: ANN001
    ROWS: tl.constexpr,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK).to(tl.int64)
    inside = row < ROWS
    where = request * ROWS + row
    choices = tl.load(choices_ptr + where, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + where, mask=inside, other=-1)
    parents = tl.load(parents_ptr + where, mask=inside, other=0)
    depths = tl.load(depths_ptr + where, mask=inside, other=0)
    bits = tl.load(bits_ptr + where, mask=inside, other=0)
    right = (_pick(choices, parents, row) == tokens) | (row == 0)
    one = tl.full([BLOCK], 1, tl.int64)
    wrong_bits = tl.sum(tl.where(inside & (right == 0), one << row, 0), 0)
    reached = tl.where(inside & ((bits & wrong_bits) == 0), depths, -1)
    num_accepted = tl.max(reached, 0)
    last = tl.min(tl.where(reached == num_accepted, row, BLOCK), 0)
    last_bits = tl.sum(tl.where(row == last, bits, 0), 0)
    in_path = inside & (((last_bits >> row) & 1) == 1)
    depth = tl.arange(0, BLOCK_D).to(tl.int64)
    here = in_path[:, None] & (depths[:, None] == depth[None, :])
    nodes = tl.sum(tl.where(here, row[:, None], 0), 0)
    nodes = tl.where(depth <= num_accepted, nodes, last)
    taken = tl.sum(tl.where(row[:, None] == nodes[None, :], choices[:, None], 0), 0)
    where = request * DEPTHS + depth
    tl.store(tokens_out + where, taken, mask=depth < DEPTHS)
    tl.store(nodes_out + where, nodes, mask=depth < DEPTHS)
    tl.store(counts_out + request, num_accepted + 1)


def accept_path(
    choices: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, bits: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See eyas.kernels.reference.step_tree.accept_path."""
    num_requests, rows = tokens.shape
    taken, nodes = (choices.new_empty(num_requests, max_depth + 1) for _ in range(2))
    counts = choices.new_empty(num_requests)
    _path_kernel[(num_requests,)](
        choices.contiguous(),
        tokens.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        bits.contiguous(),
        taken,
        counts,
        nodes,
        ROWS=rows,
        DEPTHS=max_depth + 1,
        BLOCK=max(16, triton.next_power_of_2(rows)),
        BLOCK_D=max(16, triton.next_power_of_2(max_depth + 1)),
        num_warps=4,
    )
    return taken, counts, nodes
