import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.core.tree import DraftTree


def path_to_root(parents, node):
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path


@st.composite
def trees(draw):
    size = draw(st.integers(1, 20))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))


def test_docstring_example():
    tree = DraftTree((-1, 0, 0, 1))
    assert tree.depths == (0, 1, 1, 2)
    assert tree.ancestor_bits == (1, 3, 5, 11)
    assert not tree.is_chain
    assert tree.num_nodes == 4


@given(trees())
def test_depths_and_bits_against_walks_to_the_root(parents):
    tree = DraftTree(parents)
    for node in range(tree.num_nodes):
        path = path_to_root(parents, node)
        assert tree.depths[node] == len(path) - 1
        assert {j for j in range(tree.num_nodes) if tree.ancestor_bits[node] >> j & 1} == set(path)


@pytest.mark.parametrize("k", [0, 1, 7])
def test_chain(k):
    tree = DraftTree.chain(k)
    assert tree.is_chain
    assert tree.num_nodes == k + 1
    assert tree.depths == tuple(range(k + 1))
    assert tree.ancestor_bits == tuple(2 ** (i + 1) - 1 for i in range(k + 1))


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 3), (-1, -1)])
def test_a_tree_that_is_none_is_an_assertion(parents):
    with pytest.raises(AssertionError):
        DraftTree(parents)
