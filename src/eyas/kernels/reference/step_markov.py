"""Greedy guesses whose logits hear the guess before: a product of R numbers, one depth after the other.

Legend: B requests, K depths, Vd draft ids, R rank of the correction.
"""

import torch
from torch import Tensor
from torch.nn import functional


def markov_guess(
    logits: Tensor,
    pre: Tensor | None,
    table: Tensor,
    out: Tensor,
    index_map: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """Choose depth by depth; int64 [B, K], ids of index_map, or draft ids without one.

        row_k = act(pre[b, k] + table[c_{k-1}])        act: silu, or nothing
        c_0   = argmax_v logits[b, 0, v]
        c_k   = argmax_v (logits[b, k, v] + out[v] . row_k)

    c are draft ids; of equals the smallest wins. Sums are float32; row_k is rounded to out's type before its
    product. A request with NaN among its logits gets ids in range, which ones is not said.

    Example, Vd 3, R 1, K 2, without pre and silu: logits [[1, 9, 0], [5, 4, 3]] choose 1 at depth 0; table
    [[0], [2], [0]] gives row [2], and out [[0], [0], [3]] adds [0, 0, 6]: [5, 4, 9] -> [[1, 2]]. With
    index_map [7, 8, 9] -> [[8, 9]].

    Args:
        logits: [B, K, Vd] without the correction, of any float type.
        pre: [B, K, R]; None counts as zeros. Depth 0's is not read.
        table: [Vd, R].
        out: [Vd, R].
        index_map: int64 [Vd].
        silu: see above.
    """
    num_requests, num_depths, _ = logits.shape
    chosen = torch.empty(num_requests, num_depths, dtype=torch.int64, device=logits.device)
    across = out.float().T
    for depth in range(num_depths):
        current = logits[:, depth].float()
        if depth:
            row = table[chosen[:, depth - 1]].float()
            row = row if pre is None else pre[:, depth].float() + row
            row = functional.silu(row) if silu else row
            current = current + row.to(out.dtype).float() @ across
        chosen[:, depth] = current.argmax(-1)
    return chosen if index_map is None else index_map[chosen]


def guess_in_passes(
    logits: Tensor,
    pre: Tensor | None,
    table: Tensor,
    out: Tensor,
    index_map: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """`markov_guess` with all depths in one product, again where the guess before has changed.

    What a processor wants whose cost is reading `out`: mostly two or three passes instead of K - 1. It reads
    values back, so not for CUDA.

    Example, K 4: the uncorrected guesses are [a, b, c, d]; heard by their successors they become
    [a, b, x, d], so depth 3 alone is made again, after x: [a, b, x, y]. Depth k is final after k passes at
    the latest, because what it hears is.
    """
    chosen = logits.argmax(-1)
    weights = out.float()
    stale = torch.ones_like(chosen, dtype=torch.bool)
    stale[:, 0] = False
    while bool(stale.any()):
        requests, depths = stale.nonzero(as_tuple=True)
        rows = table[chosen[requests, depths - 1]].float()
        rows = rows if pre is None else pre[requests, depths].float() + rows
        rows = functional.silu(rows) if silu else rows
        # The long side first: the other way round, a product of few rows copies `out` before it reads it.
        correction = (weights @ rows.to(out.dtype).float().T).T
        corrected = logits[requests, depths].float() + correction
        heard = chosen.clone()
        heard[requests, depths] = corrected.argmax(-1)
        changed = heard != chosen
        chosen, stale = heard, torch.zeros_like(stale)
        stale[:, 1:] = changed[:, :-1]
    return chosen if index_map is None else index_map[chosen]
