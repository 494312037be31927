"""Which requests own which KV page, and which pages hold a prefix that may come again; integers only.

Pages are numbered 1 .. num_pages - 1; page 0 is the scratch page that padding writes to and nobody owns.
A page is in one of three states:

    free      nobody owns it and nothing in it is wanted; in a stack
    owned     by one request, or by several that share a prefix
    kept      nobody owns it, but its contents have a key and may be shared again; in the order of release

Kept pages count as free: `allocate` takes them, oldest first, once the stack is empty. A page's key says
everything that its contents depend on (engine/prefix), so equal keys mean equal contents; only full pages get
one, and nothing is ever written to a page that has a key.

Freed pages go back so that the next request gets them in the same, ascending order: a lone request on the
CPU therefore sits in consecutive pages.

Example, 5 pages (4 to give away): allocate(2) -> [1, 2]; keep(1, b"x"); free([1, 2]); find([b"x", b"y"])
-> [1]; share([1]); allocate(2) -> [2, 3].
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockManager:
    """A stack of free page numbers, and pages by key."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "one scratch page and at least one to give away"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_owners = [0] * num_pages
        self._kept: dict[int, None] = {}
        """In the order of release, which dictionaries keep."""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, the scratch page not counted."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Pages that nobody owns and that hold a prefix."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked that so many are free."""
        assert 0 <= count <= self.num_free, f"{count} pages asked, {self.num_free} free"
        for _ in range(count - len(self._free)):
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._forget(oldest)
            self._free.insert(0, oldest)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        for page in taken:
            self._num_owners[page] = 1
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give one owner's pages back, last one first: of those with a key it is the first to go."""
        for page in reversed(pages):
            self._num_owners[page] -= 1
            if self._num_owners[page] > 0:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int, key: bytes) -> None:
        """Note that an owned, full page holds what `key` says, unless another page is known to."""
        assert self._num_owners[page] > 0, f"page {page} has no owner"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def drop(self, pages: Sequence[int]) -> None:
        """Forget what owned pages hold: it is not to be shared any more."""
        for page in pages:
            if page in self._key_of:
                self._forget(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of keys that all are known, from the first on."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unowned(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody owns: sharing them takes so many from `num_free`."""
        return sum(page in self._kept for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Give pages that `find` found one more owner."""
        for page in pages:
            self._num_owners[page] += 1
            self._kept.pop(page, None)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that free, kept and owned pages are every page together, and owners are counted right."""
        owners = Counter(page for pages in owned for page in pages)
        everything = [*self._free, *self._kept, *owners]
        assert len(everything) == len(set(everything)), "a KV page has two owners"
        assert sorted(everything) == list(range(1, self.num_pages)), "a KV page got lost"
        assert all(self._num_owners[page] == owners[page] for page in everything), "a KV page has two owners"
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert set(self._kept) <= set(self._key_of)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
