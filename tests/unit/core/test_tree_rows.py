"""Shapes on the device against the host's own, which test_tree checks by walks to the root."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.core.tree import DraftTree
from eyas.verify.tree import tree_rows


@st.composite
def same_size_trees(draw):
    size = draw(st.integers(1, 63))
    return [[draw(st.integers(0, node - 1)) for node in range(1, size)] for _ in range(3)]


@given(same_size_trees())
def test_equals_the_host(parents):
    hosts = [DraftTree((-1, *row)) for row in parents]
    depth = max(host.depth for host in hosts)
    for bound in (depth, depth + 3):
        rows = tree_rows(torch.tensor(parents, dtype=torch.int64).view(3, -1), bound)
        assert rows.depths.tolist() == [list(host.depths) for host in hosts]
        assert rows.ancestor_bits.tolist() == [list(host.ancestor_bits) for host in hosts]
        assert rows.parents[:, 1:].tolist() == parents
        assert rows.parents[:, 0].tolist() == [0, 0, 0]


def test_the_longest_chain():
    rows = tree_rows(torch.arange(62)[None], 62)
    assert rows.depths.tolist() == [list(range(63))]
    assert rows.ancestor_bits[0, -1] == 2**63 - 1
