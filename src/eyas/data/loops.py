"""Find where an answer begins to loop, and cut it there: a small target often repeats itself until its limit.

A token *repeats* where it lies in an n-gram that began earlier in the same answer. An answer *loops* from the
first token on from which every window has a certain share of repeating tokens, up to its end: one that quotes
itself and goes on does not loop. Repeats may have gaps, so a numbered list of one sentence is a loop too.

    ngram 2, window 4, share 0.75
    answer      a  b  c  d  b  c  d  b  c  d  b  c
    repeats     .  .  .  .  x  x  x  x  x  x  x  x       bc at 4 began at 1, cd at 5 began at 2, ...
    windows     0  1  2  3  4  4  4  4  4                repeating tokens in the 4 tokens from here
    loop                 ^  from here every window has 3 or 4; its first repeating token is number 4

`keep` tokens of a loop stay, so that a head still learns to follow one. What follows them is cut if it ends
the document; an earlier answer's loop stays as context and is no longer supervised.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eyas.core.errors import ConfigError
from eyas.data.template import Span


@dataclass(frozen=True, slots=True)
class LoopRule:
    """What counts as a loop; raises ConfigError naming the value that cannot be."""

    ngram: int = 6
    """Tokens of a repeated n-gram: long ones miss lists that count, short ones find loops in any code."""
    window: int = 64
    """Tokens over which the share is taken; no loop is shorter."""
    share: float = 0.85
    """Of a window's tokens, how many must repeat, in (0, 1]."""
    keep: int = 48
    """Tokens of the loop that stay."""

    def __post_init__(self) -> None:
        if self.ngram < 1 or self.window < 1 or self.keep < 0:
            raise ConfigError(
                f"ngram {self.ngram}, window {self.window}, keep {self.keep}: "
                "ngram and window are at least 1, keep at least 0"
            )
        if not 0 < self.share <= 1:  # refuses NaN too
            raise ConfigError(f"share {self.share}: must be more than 0 and at most 1")

    @property
    def needed(self) -> int:
        """Repeating tokens that a window must have: share 0.85 of 64 -> 55; never 0."""
        # The small number keeps 0.9 * 10 at 9 whatever the rounding.
        return max(1, math.ceil(self.share * self.window - 1e-9))


def repeating(ids: ArrayLike, ngram: int) -> NDArray[np.bool_]:
    """Which tokens lie in an n-gram that began earlier too, bool [n].

    repeating([1, 2, 3, 1, 2, 9], 2) -> [F, F, F, T, T, F]; repeating([7, 7, 7], 2) -> [F, T, T].
    """
    tokens = np.asarray(ids, dtype=np.int64)
    covered = np.zeros(len(tokens) + 1, dtype=np.int32)
    if len(tokens) <= ngram:
        return covered[:-1] > 0
    # Numbers for n-grams of 1, 2, 4, ... tokens, then for those of `ngram`, each two overlapping ones: exact.
    codes, length = np.unique(tokens, return_inverse=True)[1], 1
    while length < ngram:
        step = min(length, ngram - length)
        pairs = codes[:-step] * np.int64(len(tokens)) + codes[step:]
        codes, length = np.unique(pairs, return_inverse=True)[1], length + step
    first = np.unique(codes, return_index=True)[1]
    begins = np.flatnonzero(first[codes] < np.arange(len(codes)))
    covered[begins] += 1
    covered[begins + ngram] -= 1
    return covered[:-1].cumsum() > 0


def loop_start(ids: ArrayLike, rule: LoopRule) -> int:
    """Where the loop that ends this answer begins; len(ids) if it does not loop.

    rule = LoopRule(ngram=2, window=4, share=0.75):
    loop_start([1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 2, 3], rule) -> 4.
    """
    repeats = repeating(ids, rule.ngram)
    if len(repeats) < rule.window:
        return len(repeats)
    total = np.concatenate([[0], repeats.cumsum()])
    poor = np.flatnonzero(total[rule.window :] - total[: -rule.window] < rule.needed)
    begin = int(poor[-1]) + 1 if len(poor) else 0
    if begin + rule.window > len(repeats):
        return len(repeats)
    return begin + int(repeats[begin:].argmax())


def trim_document(
    ids: ArrayLike, spans: list[Span], rule: LoopRule
) -> tuple[int, list[Span], list[tuple[int, int]]]:
    """Return how many tokens of a document stay, its new spans, and its loops as (answer, first token).

    rule = LoopRule(ngram=2, window=4, share=0.75, keep=2), the answer above behind a prompt of 3 tokens,
    spans [(3, 15)] -> (9, [(3, 9)], [(0, 7)]); another answer behind it, 20 tokens, [(3, 15), (18, 20)]
    -> (20, [(3, 9), (18, 20)], [(0, 7)]).
    """
    tokens = np.asarray(ids)
    size, kept, loops = len(tokens), list(spans), []
    for number, (begin, end) in enumerate(spans):
        loop = begin + loop_start(tokens[begin:end], rule)
        if loop < end:
            loops.append((number, loop))
        # A token of the answer always stays: a loop's first token has one before it that it repeats.
        if loop + rule.keep < end:
            kept[number] = (begin, loop + rule.keep)
            if number == len(spans) - 1:
                size = loop + rule.keep
    return size, kept, loops
