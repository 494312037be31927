"""Pages have one owner each."""

import pytest

from eyas.engine.block_manager import BlockManager


def test_pages_come_in_ascending_order_and_come_back():
    blocks = BlockManager(5)

    assert blocks.allocate(2) == [1, 2]
    assert blocks.allocate(1) == [3]
    blocks.free([1, 2])
    assert blocks.num_free == 3
    assert blocks.allocate(3) == [1, 2, 4]


def test_nothing_asked_nothing_given():
    blocks = BlockManager(3)

    assert blocks.allocate(0) == []
    assert blocks.num_free == 2


def test_the_scratch_page_is_never_given_away():
    blocks = BlockManager(4)

    assert 0 not in blocks.allocate(3)


def test_more_than_there_is_breaks_an_invariant():
    with pytest.raises(AssertionError, match="4 pages asked, 3 free"):
        BlockManager(4).allocate(4)


def test_integrity_finds_a_page_freed_twice():
    blocks = BlockManager(4)
    pages = blocks.allocate(2)
    blocks.free(pages)
    blocks.free(pages)

    with pytest.raises(AssertionError, match="two owners"):
        blocks.check_integrity([])


def test_integrity_finds_a_lost_page():
    blocks = BlockManager(4)
    blocks.allocate(2)

    with pytest.raises(AssertionError, match="lost"):
        blocks.check_integrity([[1]])


def test_integrity_finds_a_page_that_two_requests_think_they_own():
    blocks = BlockManager(4)
    pages = blocks.allocate(3)

    with pytest.raises(AssertionError, match="two owners"):
        blocks.check_integrity([pages, pages[:1]])
