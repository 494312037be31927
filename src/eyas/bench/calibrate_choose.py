"""Which draft shape is fastest at each batch size: arithmetic on what was timed and what was accepted.

tokens/s of a batch = batch * tokens that a request commits a step / time of a step. Steps are timed for some
K and read off the straight line between two of them for the others; a chain or tree commits what was
measured with it, a chain of another K 1 plus the chances that depth 1 .. K are accepted, moved by what the
measured ones on both sides of it commit more.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A chain of k drafts, or a tree of k drafted nodes, as TreeBudget.parse reads it.

    k = 0 drafts nothing, but keeps the drafter's cache: the next step may have another k.
    """

    k: int
    tree: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest shape for batches up to max_batch."""

    max_batch: int
    k: int
    tree: str | None
    tokens_per_second: float
    chain_k: int
    """K of the fastest chain: for an engine that cannot tell the tree from others (engine/calibrated)."""


def chain_lengths(
    acceptance_by_depth: Sequence[float], measured: Mapping[int, float] | None = None
) -> list[float]:
    """Tokens a step of chains of 0, 1, .. drafts.

    The shares of a long chain's steps that accept depth 1, 2, ... sum up to a little less than shorter chains
    commit: a long run of hits is one step of the long chain and several of a short one. So the sums are moved
    to what was `measured` with some K; between them by straight lines.

    >>> chain_lengths([0.5, 0.25])
    [1.0, 1.5, 1.75]
    >>> chain_lengths([0.5, 0.25, 0.25], {1: 1.75, 3: 2.0})
    [1.0, 1.75, 1.875, 2.0]
    """
    lengths = [1.0]
    for share in acceptance_by_depth:
        lengths.append(lengths[-1] + share)
    moves = {k: length - lengths[k] for k, length in (measured or {}).items() if k < len(lengths)}
    for k in range(min(moves), max(moves) + 1) if moves else ():
        lengths[k] += interpolate(moves, k)
    return lengths


def interpolate(points: Mapping[int, float], k: int) -> float:
    """Value at k on the broken line through points; k lies between the smallest and the largest.

    >>> interpolate({1: 10.0, 3: 14.0}, 2)
    12.0
    """
    known = sorted(points)
    assert known[0] <= k <= known[-1], f"{k} is outside {known}"
    above = known[bisect_left(known, k)]
    if above == k:
        return points[k]
    below = known[bisect_left(known, k) - 1]
    share = (k - below) / (above - below)
    return points[below] + share * (points[above] - points[below])


def estimates(
    batch: int,
    chain_ms: Mapping[int, float],
    lengths: Sequence[float],
    tree_ms: Mapping[Shape, float],
    tree_lengths: Mapping[Shape, float],
) -> dict[Shape, float]:
    """Tokens a second of every shape at one batch size.

    Args:
        batch: requests.
        chain_ms: time of a step by K; 0 is not on the line of the others.
        lengths: `chain_lengths`; K beyond the last timed one or the last known depth are left out.
        tree_ms: time of a step of each tree.
        tree_lengths: tokens that each of them commits a step.
    """
    drafted = {k: ms for k, ms in chain_ms.items() if k > 0}
    found = {Shape(0): 1e3 * batch / chain_ms[0]}
    for k in range(min(drafted), min(max(drafted), len(lengths) - 1) + 1) if drafted else ():
        found[Shape(k)] = 1e3 * batch * lengths[k] / interpolate(drafted, k)
    for shape, ms in tree_ms.items():
        found[shape] = 1e3 * batch * tree_lengths[shape] / ms
    return found


def choose(by_batch: Mapping[int, Mapping[Shape, float]]) -> list[Choice]:
    """The best shape of each batch size, smallest batch first; of equals the one that drafts least."""
    choices = []
    for batch in sorted(by_batch):
        rates = by_batch[batch]
        order = sorted(rates, key=lambda shape: (-rates[shape], shape.k, shape.tree or ""))
        best, chain = order[0], next(shape for shape in order if shape.tree is None)
        choices.append(Choice(batch, best.k, best.tree, rates[best], chain.k))
    return choices
