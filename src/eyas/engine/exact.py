"""The target's own next-token distribution, computed without cache, batch or engine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.kernels.reference.random import TARGET, uniform
from eyas.nn.packed import PackedContext
from eyas.targets.base import Target

Cell = tuple[int, ...]
"""A prefix of output tokens; -1 at its end stands for every token that has no cell of its own there."""
OTHER = -1


@torch.no_grad()
def next_logits(target: Target, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Logits of the token after each context, float64 [N, V]; contexts must be of one length.

    One plain forward over whole sequences.
    """
    token_ids = torch.tensor(list(map(list, contexts)), device=target.device)
    positions = torch.arange(token_ids.shape[1], device=target.device).expand_as(token_ids)
    context = PackedContext.of(torch.zeros_like(token_ids), positions)
    hidden, _ = target.decoder(token_ids, positions, context)
    logits: Tensor = target.decoder.logits(hidden[:, -1])
    return logits.double()


def token_tree(
    target: Target, prompt_ids: Sequence[int], *, temperature: float, depth: int, num_top: int
) -> dict[Cell, float]:
    """Exact probabilities of the first `depth` output tokens, the likely ones each, the rest pooled.

    Under every prefix of likely tokens the num_top likeliest continue and the others share one cell that
    ends in OTHER. Probabilities sum to 1.

    Example, depth 2, num_top 1, p(7) = .6, p(3 | 7) = .5: {(7, 3): .3, (7, -1): .3, (-1,): .4}
    """
    cells: dict[Cell, float] = {}
    prefixes: list[tuple[Cell, float]] = [((), 1.0)]
    for level in range(depth):
        logits = next_logits(target, [[*prompt_ids, *prefix] for prefix, _ in prefixes])
        top, top_ids = (logits / temperature).softmax(-1).topk(min(num_top, logits.shape[1]), dim=-1)
        deeper: list[tuple[Cell, float]] = []
        for (prefix, mass), probs, ids in zip(prefixes, top.tolist(), top_ids.tolist(), strict=True):
            deeper.extend(((*prefix, token), mass * p) for token, p in zip(ids, probs, strict=True))
            cells[*prefix, OTHER] = mass * max(0.0, 1.0 - sum(probs))
        if level == depth - 1:
            cells.update(deeper)
        prefixes = deeper
    return cells


def cell_of(tokens: Sequence[int], cells: dict[Cell, float]) -> Cell:
    """Where an output of at least the tree's depth belongs: under its longest prefix of likely tokens.

    Example, cells (7, 3), (7, -1), (-1,): [7, 3] -> (7, 3), [7, 9] -> (7, -1), [2, 3] -> (-1,).
    """
    depth = max(map(len, cells))
    whole = tuple(tokens[:depth])
    if whole in cells:
        return whole
    return next((*whole[:end], OTHER) for end in range(depth - 1, -1, -1) if (*whole[:end], OTHER) in cells)


def rounding_distance(
    target: Target, context: Sequence[int], pair: tuple[int, int], *, temperature: float, seed: int
) -> float:
    """How much rounding would explain that one run drew pair[0] and another pair[1] after this context.

    The distance, in probability, of the keyed random number from the intervals that the two tokens own on
    [0, 1). A tie at rounding level is near 0; a real difference in what was computed is not.
    """
    logits = next_logits(target, [context])[0]
    upper = (logits / temperature).softmax(-1).cumsum(-1)
    lower = torch.cat([upper.new_zeros(1), upper[:-1]])
    place = torch.tensor(len(context), device=target.device)
    u = uniform(torch.tensor(seed, device=target.device), place, TARGET)
    ids = list(pair)
    return float(torch.maximum(lower[ids] - u, u - upper[ids]).clamp(min=0).max())
