"""The pool of KV-cache pages: a free list and reference counts. It counts integers only; the tensors live in the
runner."""

from __future__ import annotations


class Held:
    """The number of a window page or a state that a node holds. Each assignment makes a new object, so a thread that
    copies the memory sees whether the node's number was replaced."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class PagePool:
    """Allocates and frees pages. A page is free exactly if its count is zero."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        """A stack of the free pages, changed by the pool only: the last freed page is used next."""
        self._counts = [0] * num_pages

    def count(self, page: int) -> int:
        """Returns the number of holders of this page: page tables, and the radix tree."""
        return self._counts[page]

    def take(self) -> int:
        """Allocates a free page, with a count of one. Raises IndexError if no page is free: check `free` first."""
        page = self.free.pop()
        self._counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds a holder to a page in use. Raises RuntimeError for a free page."""
        if self._counts[page] == 0:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._counts[page] += 1

    def give_back(self, page: int) -> int:
        """Removes a holder from a page; returns the number of remaining ones. At 0 the page is free. Raises
        RuntimeError for a free page."""
        count = self._counts[page] - 1
        if count < 0:
            raise RuntimeError(f"page {page} was given back more often than taken")
        self._counts[page] = count
        if count == 0:
            self.free.append(page)
        return count

    def check(self, holders: list[int]) -> list[str]:
        """Compares the counts with `holders`, the real number of holders of each page. Returns the errors."""
        wrong = [
            f"page {page}: count {count}, held by {real}"
            for page, (count, real) in enumerate(zip(self._counts, holders, strict=True))
            if count != real
        ]
        if sorted(self.free) != [page for page, real in enumerate(holders) if real == 0]:
            wrong.append("the free list is not the list of pages without a holder")
        return wrong
