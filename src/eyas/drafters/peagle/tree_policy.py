"""Best-first tree over parallel marginals: the N most likely paths of one forward.

P-EAGLE's depths are guessed at once, so a path (x1, .., xd) has log q(x1) + .. + log q_d(xd), and the k
candidates of a depth are the same below every node. Best-first search pops the most likely path from a heap
N times, each pop offering its children. Here the same set comes from a beam, without a loop over nodes: a
prefix of a path is at least as likely as the path, so a path of depth d among the N best has its prefixes
among the N best of their depths. The depth-D most likely path is kept first, and of a beam of N nothing
further is lost.
"""

from torch import Tensor

from eyas.drafters.tree_pool import TreePool


def best_first(tokens: Tensor, log_q: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B, N] and parents int64 [B, N] (core/batch.Draft) of the N most likely paths.

    Example, D = 2, k = 2, N = 3: log q [[-.1, -3], [-.2, -2]] and tokens [[5, 6], [7, 8]] give the paths 5,
    5-7,
    5-8: tokens [5, 7, 8], parents [0, 1, 1].

    Args:
        tokens: int64 [B, D, k], candidates of each depth in order of falling log q.
        log_q: float [B, D, k].
        num_draft_tokens: N, from D to the number of paths (TreeBudget checks).
    """
    num_requests, depth, top_k = tokens.shape
    widths, nodes = [], 1
    for _ in range(depth):
        nodes = min(num_draft_tokens, nodes * top_k)
        widths.append(nodes)
    pool = TreePool(num_requests, sum(widths), tokens.device, children=False)
    frontier, nodes = None, 1
    for level, width in enumerate(widths):
        below = tokens[:, level, None].expand(-1, nodes, -1), log_q[:, level, None].expand(-1, nodes, -1)
        frontier = pool.grow(frontier, *below, width)
        nodes = width
    return pool.best(num_draft_tokens)
