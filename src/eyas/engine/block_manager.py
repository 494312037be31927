"""Which request owns which KV page; integers only.

Pages are numbered 1 .. num_pages - 1; page 0 is the scratch page that padding writes to and nobody owns.
A page is either in the free stack or owned by exactly one request; `check_integrity` holds that against
the owners' own lists whenever the engine is idle.

Freed pages go back so that the next request gets them in the same, ascending order: a lone request on the
CPU therefore sits in consecutive pages.

Example, 5 pages (4 to give away): allocate(2) -> [1, 2]; allocate(1) -> [3]; free([1, 2]); allocate(3)
-> [1, 2, 4].
"""

from collections.abc import Iterable, Sequence


class BlockManager:
    """A stack of free page numbers."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "one scratch page and at least one to give away"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, the scratch page not counted."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked that so many are free."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back, last one first."""
        self._free.extend(reversed(pages))

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that free and owned pages together are every page exactly once."""
        everything = [*self._free, *(page for pages in owned for page in pages)]
        assert len(everything) == len(set(everything)), "a KV page has two owners"
        assert sorted(everything) == list(range(1, self.num_pages)), "a KV page got lost"
