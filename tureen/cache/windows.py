"""Pages of the layers with a sliding window. A sequence frees them as its tokens move out of the window."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tureen.cache.pages import Held, PagePool


class WindowHolder(Protocol):
    """A node of the prefix cache. `window`: the window page of its tokens; None: it has none."""

    window: Held | None


class LivePages:
    """The window pages of a running sequence: `pages[i]` belongs to its page number `first + i`; -1: not taken yet."""

    __slots__ = ("first", "pages")

    def __init__(self, first: int, pages: tuple[int, ...]) -> None:
        self.first = first
        self.pages = pages

    @property
    def end(self) -> int:
        """The index after the last page that has a window page."""
        return self.first + len(self.pages)


NO_PAGES = LivePages(0, ())
"""The window pages of a sequence in a model without windows. Never changed."""


class WindowPages:
    """Allocates window pages. A page is free, or held by running sequences, by the node of its tokens, or by both.

    A node's window page that no running sequence holds is idle. If no page is free, the least recently used idle page
    is taken from its node, which stays in the tree.
    """

    def __init__(self, num_pages: int = 0, page_size: int = 1, window: int = 0) -> None:
        """num_pages: 0: all layers share one pool, and sequences need no window pages. window: tokens that a token of
        these layers sees, itself included."""
        self.pool = PagePool(num_pages)
        self.is_used = num_pages > 0
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

    def is_enough(self, num_in_row: int, num_pages: int) -> bool:
        """Returns whether the last `num_in_row` of `num_pages` pages include all that the next token sees."""
        return not self.is_used or num_in_row >= num_pages - self.first_seen(num_pages * self._page_size)

    def begin(self, nodes: Sequence[WindowHolder], num_tokens: int) -> LivePages:
        """Returns the window pages that the token after `num_tokens` tokens sees. Acquires those that `nodes`, the
        nodes of the first pages, have; `grow` allocates the others."""
        first = self.first_seen(num_tokens)
        held = [node.window for node in nodes[first:]]
        for node in nodes[first:]:
            if node.window is not None:
                self._share(node, node.window)
        return LivePages(first, tuple([-1 if page is None else page.number for page in held]))

    def num_missing(self, live: LivePages, num_pages: int) -> int:
        """Returns the number of pages that `grow` will take."""
        return live.pages.count(-1) + max(0, num_pages - live.end)

    def grow(self, live: LivePages, num_pages: int) -> None:
        """Takes window pages up to page number `num_pages`. Raises KeyError if `num_available` is less."""
        if self.num_missing(live, num_pages):
            pages = (*live.pages, *[-1] * (num_pages - live.end))
            live.pages = tuple([self._take() if page < 0 else page for page in pages])

    def publish(self, live: LivePages, index: int, node: WindowHolder) -> None:
        """Stores window page number `index` in `node`, if the sequence has one. If the node has one already, switches
        the sequence to it."""
        if not live.first <= index < live.end:
            return
        at = index - live.first
        own = live.pages[at]
        if node.window is None:
            node.window = Held(own)
            self.pool.share(own)
        elif node.window.number != own:
            self._share(node, node.window)
            self.pool.give_back(own)
            live.pages = (*live.pages[:at], node.window.number, *live.pages[at + 1 :])

    def slide(self, live: LivePages, nodes: Sequence[WindowHolder], num_tokens: int) -> None:
        """Frees the pages that no token after `num_tokens` sees. nodes: the nodes of the sequence's first pages."""
        first = min(self.first_seen(num_tokens), live.end)
        for index in range(live.first, first):
            self._give_back(live, nodes, index)
        if first > live.first:
            live.first, live.pages = first, live.pages[first - live.first :]

    def end(self, live: LivePages, nodes: Sequence[WindowHolder]) -> None:
        """Frees all pages of a sequence."""
        for index in reversed(range(live.first, live.end)):
            self._give_back(live, nodes, index)
        live.first, live.pages = live.end, ()

    def drop(self, node: WindowHolder) -> None:
        """Removes the node's window page, if it has one."""
        if node.window is not None:
            self.idle.pop(node, None)
            self.pool.give_back(node.window.number)
            node.window = None

    def check(self, all_live: Sequence[LivePages], nodes: Sequence[WindowHolder]) -> list[str]:
        """Verifies the counts against the running sequences and the nodes of the tree. Returns the errors."""
        holders = [0] * self.pool.num_pages
        for live in all_live:
            for page in live.pages:
                holders[page] += 1
        held = {node: node.window.number for node in nodes if node.window is not None}
        wrong = []
        if {node for node, page in held.items() if holders[page] == 0} != set(self.idle):
            wrong.append("the idle window pages are not those that only a node holds")
        for page in held.values():
            holders[page] += 1
        return wrong + [f"window {complaint}" for complaint in self.pool.check(holders)]

    def _take(self) -> int:
        if not self.pool.free:
            self.drop(next(iter(self.idle)))
        return self.pool.take()

    def _share(self, node: WindowHolder, window: Held) -> None:
        self.pool.share(window.number)
        self.idle.pop(node, None)

    def _give_back(self, live: LivePages, nodes: Sequence[WindowHolder], index: int) -> None:
        page = live.pages[index - live.first]
        if page < 0:
            return
        is_last = self.pool.give_back(page) == 1
        node = nodes[index] if is_last and index < len(nodes) else None
        if node is not None and node.window is not None and node.window.number == page:
            self.idle[node] = None
