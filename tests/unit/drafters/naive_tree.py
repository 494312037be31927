"""Draft trees as plain lists of paths: EAGLE-2's expand and rerank, and best-first search with a heap."""

import heapq


def expand_and_rerank(below, depth, top_k, num_nodes):
    """The set of kept paths; below(path) gives [(token, log q)] of its candidates, any order.

    The most likely path is kept first, in frontiers and at the end.
    """
    pool, frontier = [], [((), 0.0, True)]
    for _ in range(depth):
        offered = []
        for path, score, likely in frontier:
            children = sorted(below(path), key=lambda child: -child[1])[:top_k]
            for rank, (token, log_q) in enumerate(children):
                offered.append(((*path, token), score + log_q, likely and rank == 0))
        pool += offered
        frontier = sorted(offered, key=lambda node: (not node[2], -node[1]))[:top_k]
    kept = sorted(pool, key=lambda node: (not node[2], -node[1]))[:num_nodes]
    return {path for path, _, _ in kept}


def best_first(levels, num_nodes):
    """The set of kept paths; levels[d] is [(token, log q)] of depth d + 1, the same below every node."""
    likely = [max(level, key=lambda child: child[1])[0] for level in levels]
    kept = {tuple(likely[:d]) for d in range(1, len(levels) + 1)}
    heap = [(0.0, ())]
    while len(kept) < num_nodes:
        cost, path = heapq.heappop(heap)
        if path:
            kept.add(path)
        if len(path) < len(levels):
            for token, log_q in levels[len(path)]:
                heapq.heappush(heap, (cost - log_q, (*path, token)))
    return kept


def paths(tokens, parents):
    """Paths of one request's draft; checks that parents come before children and siblings differ."""
    out = [()]
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        assert 0 <= parent < row
        out.append((*out[parent], token))
    assert len(set(out)) == len(out), "siblings are distinct"
    return set(out[1:])
