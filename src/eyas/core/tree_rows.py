"""Draft trees on the device: one shape a request, found from parents alone without a loop over nodes.

Row 0 is the root, the last committed token; drafted nodes follow, parents before children (core/tree).

Example, the tree of core/tree for one request:
    parents [[0, 0, 0, 1]]   depths [[0, 1, 1, 2]]   ancestor_bits [[1, 3, 5, 11]]
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TreeRows(NamedTuple):
    """Trees of B requests with R rows each, R <= 63."""

    parents: Tensor
    """int64 [B, R]; the root is its own parent here, so that walks upwards end there"""
    depths: Tensor
    """int64 [B, R]"""
    ancestor_bits: Tensor
    """int64 [B, R]; bit j of row i: row j is row i or above it"""

    @classmethod
    def from_parents(cls, draft_parents: Tensor, max_depth: int) -> "TreeRows":
        """Lay out the rows of drafts whose parents are draft_parents int64 [B, N], as row numbers.

        `max_depth` bounds the depths. Each round doubles the distance that a row has looked up.
        """
        num_requests, num_drafts = draft_parents.shape
        row = torch.arange(num_drafts + 1, device=draft_parents.device).expand(num_requests, -1)
        parents = torch.cat((row[:, :1], draft_parents), dim=1)
        above, depths, bits = parents, (row > 0).long(), torch.ones_like(row) << row
        for _ in range(max_depth.bit_length()):
            bits = bits | bits.gather(1, above)
            depths = depths + depths.gather(1, above)
            above = above.gather(1, above)
        return cls(parents, depths, bits)
