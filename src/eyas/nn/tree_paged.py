"""Rows of draft trees in a paged cache, and the move of accepted ones to where the next step expects them.

While a tree is verified its rows stand at the KV indices start, start + 1, ... in the order of the rows,
whatever their depths; RoPE positions follow the depths. Afterwards only a path is kept, and index must equal
position again.

Example, start 5, rows root, a, b, and c below a (depths 0 1 1 2), path root - b accepted:
    KV index   5     6  7  8           position 5 6 6 7
    move       row at index 7 (b) -> index 6; the next step overwrites 7 and 8
"""

from torch import Tensor

from eyas.core.batch import ForwardBatch, KVCache
from eyas.kernels import dispatch, dispatch_step


def tree_batch(
    *,
    token_ids: Tensor,
    depths: Tensor,
    bits: Tensor,
    start: Tensor,
    first: int,
    page_table: Tensor,
    page_size: int,
    max_position: int,
    max_visible: int,
) -> ForwardBatch:
    """A ForwardBatch of R tree rows a request: row j is written at KV index start + first + j.

    Rows see the committed prefix [0, start) and the indices start + i with bit i set. Rows whose index is
    max_position or more are padding: slot -1, nothing visible. Nothing is read back to the host.

    Args:
        token_ids: int64 [B, R].
        depths: int64 [B, R]; a row's RoPE position is start + depth.
        bits: int64 [B, R].
        start: int64 [B], committed KV indices before the tree.
        first: index of the first row in the tree's own space (0 but for a drafter's later forwards).
        page_table: int32 [B, P].
        page_size: tokens a page.
        max_position: no page from here on.
        max_visible: bound on `start`.
    """
    each = token_ids.shape[1]
    rows = dispatch.tree_rows(start, depths, bits, page_table, first, page_size, max_position)
    return ForwardBatch(
        token_ids=token_ids.reshape(-1),
        positions=rows.positions,
        slots=rows.slots,
        visible=rows.visible,
        q_start=rows.q_start,
        page_table=page_table,
        max_rows=each,
        max_visible=max_visible,
        uniform_rows=each,
        tree_bits=rows.tree_bits,
    )


def move_rows(
    cache: KVCache, page_table: Tensor, start: Tensor, nodes: Tensor, counts: Tensor, max_position: int
) -> None:
    """Copy K and V of the accepted nodes to consecutive KV indices, on every layer.

    See kernels/reference/step_move.
    """
    dispatch_step.move_nodes(cache.keys, cache.values, page_table, start, nodes, counts, max_position)
