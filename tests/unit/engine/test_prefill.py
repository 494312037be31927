"""Rectangles of rows for the drafter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.postprocess import origins_table
from eyas.engine.prefill import MAX_PADDING, rectangles


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([100, 98, 20, 19], [(0, 2), (2, 4)]),
        ([5], [(0, 1)]),
        ([7, 7, 7], [(0, 3)]),
        ([512, 1, 1], [(0, 1), (1, 3)]),
    ],
)
def test_groups(lengths, groups):
    assert rectangles(lengths) == groups


@given(st.lists(st.integers(1, 600), min_size=1, max_size=40))
def test_groups_cover_everything_with_little_padding(lengths):
    lengths = sorted(lengths, reverse=True)
    groups = rectangles(lengths)

    assert [index for begin, end in groups for index in range(begin, end)] == list(range(len(lengths)))
    for begin, end in groups:
        area = lengths[begin] * (end - begin)
        assert sum(lengths[begin:end]) >= (1 - MAX_PADDING) * area


def test_origins():
    assert origins_table(2) == [[], [0], [1, 0], [1, 2, 0]]
    assert origins_table(0) == [[], [0]]
