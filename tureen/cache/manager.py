"""Pages for sequences: finds cached prefixes, allocates pages, publishes computed ones, frees all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tureen.cache.pages import PagePool
from tureen.cache.radix import Namespace, RadixNode, RadixTree
from tureen.cache.states import SavedStates
from tureen.cache.windows import NO_PAGES, LivePages, WindowPages


class PageTable:
    """The pages of one running sequence, in order. Changed by its CacheManager only."""

    __slots__ = ("is_open", "is_public", "live", "namespace", "nodes", "num_matched", "pages", "room", "saves_early")

    def __init__(
        self,
        namespace: Namespace,
        nodes: list[RadixNode],
        live: LivePages,
        *,
        is_public: bool,
        saves_early: bool = False,
    ) -> None:
        self.namespace = namespace
        self.nodes = nodes  # the tree nodes of the first pages: first found ones, then published ones
        self.num_matched = len(nodes)
        self.pages = tuple([node.page for node in nodes])  # as rows carry them
        self.live = live  # the window pages
        self.room = 0  # number of tokens that the pages can hold, after it has grown
        self.is_open = True
        self.is_public = is_public  # its full pages enter the tree as they are computed
        self.saves_early = saves_early  # and are then saved in the lower tier

    def replace(self, index: int, page: int) -> None:
        """Replaces the page at `index`."""
        self.pages = (*self.pages[:index], page, *self.pages[index + 1 :])


class LowerTier(Protocol):
    """Stores pages that the KV cache may evict."""

    def save(self, nodes: Sequence[RadixNode]) -> None:
        """Saves a prefix in the background: consecutive nodes, from the root on."""

    def forget(self, nodes: Sequence[RadixNode], first: int) -> None:
        """Removes pages that may be wrong: those of `nodes` from the index `first` on."""

    def renew(self) -> None:
        """Called after the tree was cleared, for example because the weights changed."""

    def close(self) -> None:
        """Saves waiting pages, for a limited time."""


class CacheManager:
    """Owns the page pool and the radix tree. A page is free, or held by page tables, by the tree, or by both."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        states: Iterable[int] | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        """states: numbers for saved states of layers without attention; None: the model has no such layers.

        windows: the pool of window pages; None: all layers share one pool.
        """
        self.page_size = page_size
        self.has_states = states is not None
        self.states = SavedStates(states or ())
        self.pool = PagePool(num_pages)
        self.windows = windows or WindowPages()
        self.has_windows = self.windows.is_used
        self.tree = RadixTree(self.pool, page_size, self._on_removed)
        self._prefix_cache = prefix_cache  # False: no page is published, so no prefix is ever found
        self._open: dict[PageTable, None] = {}
        self.tier: LowerTier | None = None  # saves the pages of closed tables

    @property
    def num_available(self) -> int:
        """The number of available pages: free ones, and those that only the radix tree holds."""
        return len(self.pool.free) + len(self.tree.idle)

    def num_pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, namespace: Namespace, token_ids: Sequence[int], max_tokens: int) -> list[RadixNode]:
        """Returns the nodes of the longest cached prefix of at most `max_tokens` tokens, full pages only. Locks
        nothing.

        In a model with layers without attention, a prefix is usable up to its last page with a saved state. With
        windows, it is usable if the window pages that the next token sees are still cached.
        """
        nodes = self.known(namespace, token_ids, max_tokens)
        if self.has_states or self.has_windows:
            del nodes[self.num_usable(nodes) :]
        return nodes

    def known(self, namespace: Namespace, token_ids: Sequence[int], max_tokens: int) -> list[RadixNode]:
        """Returns the nodes of a prefix that are in the tree, even if no sequence can begin after them."""
        return self.tree.match(namespace, token_ids, max_tokens // self.page_size)

    def num_usable(self, nodes: Sequence[RadixNode]) -> int:
        """Returns the number of nodes of a prefix after which a sequence can begin. See `match`."""
        if not self.has_states and not self.has_windows:
            return len(nodes)
        num_usable = num_in_row = 0  # in_row: nodes up to this one that have a window page
        for count, node in enumerate(nodes, 1):
            num_in_row = num_in_row + 1 if node.window is not None else 0
            if self.windows.is_enough(num_in_row, count) and not (self.has_states and node.state is None):
                num_usable = count
        return num_usable

    def keep_state(self, table: PageTable, num_tokens: int, number: int) -> RadixNode | None:
        """Stores the state after the table's first `num_tokens` tokens at the node of the page that it follows.

        Returns that node. Returns None, and frees the number, if the page is not published or already has a state.
        """
        index = num_tokens // self.page_size - 1
        if index >= len(table.nodes) or not self.tree.is_attached(table.nodes[index]):
            self.states.give_back(number)
            return None
        return table.nodes[index] if self.states.hold(table.nodes[index], number) else None

    def open(
        self,
        namespace: Namespace,
        nodes: list[RadixNode],
        num_tokens: int,
        *,
        headroom: int,
        first_step: int | None = None,
        is_public: bool = True,
        saves_early: bool = False,
    ) -> PageTable | None:
        """Makes a page table that starts with the matched `nodes` and has pages for `num_tokens`.

        first_step: number of tokens in the first step, for which window pages are taken; None: all tokens are loaded,
        not computed, so window pages are taken for those that the token after them sees.
        is_public: whether its pages are published. Pages of a client's embeddings are not, because their token ids do
        not identify their content. saves_early: whether pages are saved when they are published, not at the end.

        Returns None if fewer than `headroom` pages would be left; then only the LRU order has changed.
        """
        for node in nodes:
            self.tree.lock(node)
        if self.has_states and nodes:
            self.states.touch(nodes[-1])
        num_matched = len(nodes) * self.page_size
        live = NO_PAGES
        if self.has_windows:
            live = self.windows.begin(nodes, num_tokens if first_step is None else num_matched)
        table = PageTable(namespace, nodes, live, is_public=self._prefix_cache and is_public, saves_early=saves_early)
        end = num_tokens if first_step is None else min(num_tokens, num_matched + first_step)
        if not self._has_room(table, num_tokens, end, headroom):
            self._release(table)
            return None
        self._open[table] = None
        self._take_pages(table, num_tokens, end)
        return table

    def grow(self, table: PageTable, num_tokens: int) -> bool:
        """Allocates pages until the table has room for `num_tokens`. Returns False, and changes nothing, if there are
        too few."""
        if not self._has_room(table, num_tokens, num_tokens, 0):
            return False
        self._take_pages(table, num_tokens, num_tokens)
        return True

    def _has_room(self, table: PageTable, num_tokens: int, window_end: int, headroom: int) -> bool:
        """Returns whether `headroom` pages would be left if the table had pages for `num_tokens` and window pages for
        `window_end` tokens."""
        missing = self.num_pages_for(num_tokens) - len(table.pages)
        if missing + headroom > self.num_available:
            return False
        if not self.has_windows:
            return True
        missing = self.windows.num_missing(table.live, self.num_pages_for(window_end))
        return missing + headroom <= self.windows.num_available

    def _take_pages(self, table: PageTable, num_tokens: int, window_end: int) -> None:
        new = []
        for _ in range(self.num_pages_for(num_tokens) - len(table.pages)):
            if not self.pool.free:
                self.tree.evict()
            new.append(self.pool.take())
        table.pages += tuple(new)
        num_pages = len(table.pages)
        if self.has_windows:
            self.windows.grow(table.live, self.num_pages_for(window_end))
            num_pages = table.live.end
        table.room = num_pages * self.page_size

    def publish(self, table: PageTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Adds the table's full pages among the first `num_computed` tokens to the tree, where other sequences find
        them.

        If the tree already has a page with these tokens, the table switches to that page and frees its own. Frees
        window pages that no later token sees.
        """
        self._publish(table, token_ids, num_computed)
        if self.has_windows:
            self.windows.slide(table.live, table.nodes, num_computed)

    def _publish(self, table: PageTable, token_ids: Sequence[int], num_computed: int) -> None:
        while table.is_public and len(table.nodes) < num_computed // self.page_size:
            index = len(table.nodes)
            parent = table.nodes[-1] if table.nodes else self.tree.root
            if not self.tree.is_attached(parent):  # removed after its sequence failed: no node may be below it
                table.is_public = False
                return
            page = table.pages[index]
            node = self.tree.insert(parent, self.tree.key(table.namespace, token_ids, index), page)
            if node.page != page:
                self.tree.lock(node)
                self.pool.give_back(page)
                table.replace(index, node.page)
            if self.has_windows:
                self.windows.publish(table.live, index, node)
            table.nodes.append(node)
            if table.saves_early and self.tier is not None and index + 1 == num_computed // self.page_size:
                self.tier.save(tuple(table.nodes))

    def keep_windows(self, table: PageTable) -> None:
        """Stores a table's loaded window pages in its nodes that lack them."""
        for index, node in enumerate(table.nodes):
            if self.has_windows and self.tree.is_attached(node):
                self.windows.publish(table.live, index, node)

    def close(self, table: PageTable, *, distrust_from: int | None = None) -> None:
        """Releases all pages of the table. Published ones stay in the tree and can be evicted.

        With `distrust_from`, the tree drops the pages that this table published or used, from that index on.
        """
        if distrust_from is not None and distrust_from < len(table.nodes):
            self.tree.remove(table.nodes[distrust_from])
        self._release(table)
        table.is_open = False
        del self._open[table]
        if self.tier is not None and table.nodes:
            if distrust_from is None:
                self.tier.save(table.nodes)
            else:
                self.tier.forget(table.nodes, distrust_from)

    def _release(self, table: PageTable) -> None:
        """Releases all that the table holds."""
        if self.has_windows:
            self.windows.end(table.live, table.nodes)
        for page in reversed(table.pages[len(table.nodes) :]):
            self.pool.give_back(page)
        for node in reversed(table.nodes):
            self.tree.unlock(node)

    def _on_removed(self, node: RadixNode) -> None:
        self.states.drop(node)
        if self.has_windows:
            self.windows.drop(node)

    def flush(self) -> int:
        """Drops every unused prefix; returns the number of freed pages."""
        num_flushed = len(self.tree.idle)
        for _ in range(num_flushed):
            self.tree.evict()
        if self.tier is not None:
            self.tier.renew()
        return num_flushed

    def check(self) -> list[str]:
        """Verifies that free, cached and used pages are all pages, each counted once per holder. Returns the errors."""
        holders = [0] * self.pool.num_pages
        wrong = []
        for table in self._open:
            for page in table.pages:
                holders[page] += 1
            if tuple([node.page for node in table.nodes]) != table.pages[: len(table.nodes)]:
                wrong.append("a page table does not hold the pages of its nodes")
        nodes = self.tree.nodes()
        wrong += self.states.check(nodes)
        wrong += self.windows.check([table.live for table in self._open], nodes)
        wrong += self.tree.check(holders)  # adds the tree's references
        return wrong + self.pool.check(holders)
