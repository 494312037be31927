"""What a verification decides."""

from typing import NamedTuple

from torch import Tensor


class Accepted(NamedTuple):
    """Tokens to commit, for B requests with K drafts each.

    Example, K = 3, first draft accepted, second rejected and replaced by b:
        tokens [d1, b, *, *]   counts 2
    """

    tokens: Tensor
    """int64 [B, K + 1]; entry i is real for i < counts, a valid id beyond"""
    counts: Tensor
    """int64 [B], 1 .. K + 1: accepted drafts and one token that the target chose itself"""
