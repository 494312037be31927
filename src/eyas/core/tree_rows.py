"""Draft trees on the device: one shape a request, as kernels/reference/step_tree finds it from parents.

Row 0 is the root, the last committed token; drafted nodes follow, parents before children (core/tree).

Example, the tree of core/tree for one request:
    parents [[0, 0, 0, 1]]   depths [[0, 1, 1, 2]]   ancestor_bits [[1, 3, 5, 11]]
"""

from typing import NamedTuple

from torch import Tensor


class TreeRows(NamedTuple):
    """Trees of B requests with R rows each, R <= 63."""

    parents: Tensor
    """int64 [B, R]; the root is its own parent here, so that walks upwards end there"""
    depths: Tensor
    """int64 [B, R]"""
    ancestor_bits: Tensor
    """int64 [B, R]; bit j of row i: row j is row i or above it"""
