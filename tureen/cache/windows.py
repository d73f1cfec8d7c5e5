"""Pages of the layers with a sliding window. A sequence gives them back as its tokens move out of the window."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tureen.cache.pages import PagePool


class WindowHolder(Protocol):
    """A node of the prefix cache. `window_page`: the window page of its tokens; -1: none."""

    window_page: int


class LivePages:
    """The window pages of a running sequence: `pages[i]` belongs to its page number `first + i`."""

    __slots__ = ("first", "pages")

    def __init__(self, first: int, pages: tuple[int, ...]) -> None:
        self.first = first
        self.pages = pages

    @property
    def end(self) -> int:
        """The index after the last page that has a window page."""
        return self.first + len(self.pages)


class WindowPages:
    """Hands out window pages. A page is free, or held by running sequences, by the node of its tokens, or by both.

    A node's window page that no running sequence holds is idle. If no page is free, the least recently used idle page
    is taken from its node, which stays in the tree.
    """

    def __init__(self, num_pages: int, page_size: int, window: int) -> None:
        """window: tokens that a token of these layers sees, itself included."""
        self.pool = PagePool(num_pages)
        self.idle: OrderedDict[WindowHolder, None] = OrderedDict()
        """The nodes whose window page only they hold, in the order of their last use. Changed by this class only."""
        self._page_size = page_size
        self._window = window

    @property
    def num_available(self) -> int:
        return len(self.pool.free) + len(self.idle)

    def first_seen(self, num_tokens: int) -> int:
        """Returns the index of the first page that the token after `num_tokens` tokens sees."""
        return max(0, num_tokens + 1 - self._window) // self._page_size

    def begin(self, nodes: Sequence[WindowHolder]) -> LivePages:
        """Acquires and returns the window pages that the token after a usable prefix sees."""
        first = self.first_seen(len(nodes) * self._page_size)
        for node in nodes[first:]:
            self._share(node)
        return LivePages(first, tuple([node.window_page for node in nodes[first:]]))

    def grow(self, live: LivePages, num_pages: int) -> None:
        """Takes window pages up to page number `num_pages`. Raises KeyError if `num_available` is less."""
        live.pages += tuple([self._take() for _ in range(num_pages - live.end)])

    def publish(self, live: LivePages, index: int, node: WindowHolder) -> None:
        """Stores window page number `index` in `node`. If the node has one already, switches the sequence to it."""
        at = index - live.first
        own = live.pages[at]
        if node.window_page < 0:
            node.window_page = own
            self.pool.share(own)
        elif node.window_page != own:
            self._share(node)
            self.pool.give_back(own)
            live.pages = (*live.pages[:at], node.window_page, *live.pages[at + 1 :])

    def slide(self, live: LivePages, nodes: Sequence[WindowHolder], num_tokens: int) -> None:
        """Gives the pages back that no token after `num_tokens` sees. nodes: those of the sequence's first pages."""
        first = min(self.first_seen(num_tokens), live.end)
        for index in range(live.first, first):
            self._give_back(live, nodes, index)
        if first > live.first:
            live.first, live.pages = first, live.pages[first - live.first :]

    def end(self, live: LivePages, nodes: Sequence[WindowHolder]) -> None:
        """Gives all pages of a sequence back."""
        for index in reversed(range(live.first, live.end)):
            self._give_back(live, nodes, index)
        live.first, live.pages = live.end, ()

    def drop(self, node: WindowHolder) -> None:
        """Takes the node's window page from it, if it has one."""
        if node.window_page >= 0:
            self.idle.pop(node, None)
            self.pool.give_back(node.window_page)
            node.window_page = -1

    def check(self, all_live: Sequence[LivePages], nodes: Sequence[WindowHolder]) -> list[str]:
        """Verifies the counts against the sequences that run and the nodes of the tree. Returns what is wrong."""
        holders = [0] * self.pool.num_pages
        for live in all_live:
            for page in live.pages:
                holders[page] += 1
        with_page = [node for node in nodes if node.window_page >= 0]
        wrong = []
        if {node for node in with_page if holders[node.window_page] == 0} != set(self.idle):
            wrong.append("the idle window pages are not those that only a node holds")
        for node in with_page:
            holders[node.window_page] += 1
        return wrong + [f"window {complaint}" for complaint in self.pool.check(holders)]

    def _take(self) -> int:
        if not self.pool.free:
            self.drop(next(iter(self.idle)))
        return self.pool.take()

    def _share(self, node: WindowHolder) -> None:
        self.pool.share(node.window_page)
        self.idle.pop(node, None)

    def _give_back(self, live: LivePages, nodes: Sequence[WindowHolder], index: int) -> None:
        page = live.pages[index - live.first]
        is_last = self.pool.give_back(page) == 1
        if is_last and index < len(nodes) and nodes[index].window_page == page:
            self.idle[nodes[index]] = None
