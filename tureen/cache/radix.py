"""The prefix cache: a radix tree whose edges are page-sized chunks of token ids, so that a node is one page.

Prefix sharing by a radix tree with LRU eviction is from Zheng et al., SGLang (2023). Nodes of a single page need no
splitting and let pages enter the tree one by one, while the sequence that computes them is still running.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from tureen.cache.pages import Held, PagePool

Namespace = tuple[str, str]
"""(salt, adapter): prefixes are shared only within a namespace."""

Key = tuple[int | str, ...]
"""The token ids of a page; at the first level, the namespace precedes them."""


class RadixNode:
    """One computed page. Its holders are the page tables that use it. It is locked while it has a holder."""

    __slots__ = ("children", "key", "page", "parent", "state", "window")

    def __init__(self, key: Key, page: int, parent: RadixNode | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent  # None: the root, or a node that was evicted or removed
        self.children: dict[Key, RadixNode] = {}
        self.state: Held | None = None  # the state after this page
        self.window: Held | None = None  # the page of the same tokens in layers with a window, see WindowPages


class RadixTree:
    """Finds computed pages by their tokens. It holds one reference to the page of every node.

    A holder of a node holds all its ancestors too. So the ancestors of an idle node may be idle or locked, its
    descendants are all idle, and they became idle before it: the oldest idle node is always a leaf.
    """

    def __init__(self, pages: PagePool, page_size: int, on_removed: Callable[[RadixNode], None]) -> None:
        """on_removed: called for each node that leaves the tree."""
        self.page_size = page_size
        self.root = RadixNode((), -1, None)
        self._pages = pages
        self._on_removed = on_removed
        self.idle: OrderedDict[RadixNode, None] = OrderedDict()
        """Unlocked nodes, whose pages only the tree holds, in LRU order. Changed by the tree only."""

    def match(self, namespace: Namespace, token_ids: Sequence[int], max_pages: int) -> list[RadixNode]:
        """Returns the nodes of the longest known prefix of `token_ids`, at most `max_pages` of them. Locks nothing."""
        path: list[RadixNode] = []
        node = self.root
        while len(path) < max_pages:
            child = node.children.get(self.key(namespace, token_ids, len(path)))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def key(self, namespace: Namespace, token_ids: Sequence[int], index: int) -> Key:
        """Returns the key of the node of page number `index` of these tokens."""
        chunk = tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])
        return chunk if index else namespace + chunk

    def insert(self, parent: RadixNode, key: Key, page: int) -> RadixNode:
        """Returns the node below `parent` with this key. Makes it from `page` if it does not exist.

        `parent` is attached, and locked by the caller. A new node counts as locked by the caller, which holds `page`.
        """
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = RadixNode(key, page, parent)
            self._pages.share(page)
        return node

    def is_attached(self, node: RadixNode) -> bool:
        """Returns whether the node is still in the tree, that is, neither evicted nor removed."""
        return node.parent is not None or node is self.root

    def lock(self, node: RadixNode) -> None:
        """Adds a holder to a node. Its ancestors must be locked by the same holder, from the root down."""
        self._pages.share(node.page)
        self.idle.pop(node, None)

    def unlock(self, node: RadixNode) -> None:
        """Removes a holder from a node, from the leaf up."""
        if self._pages.give_back(node.page) == 1 and node.parent is not None:
            self.idle[node] = None

    def evict(self) -> None:
        """Drops the least recently used idle node. Raises KeyError if no node is idle."""
        node, _ = self.idle.popitem(last=False)
        self.remove(node)

    def remove(self, node: RadixNode) -> None:
        """Removes a node and its descendants, so that they are not found any more. Their holders keep the pages."""
        if node.parent is None:
            return
        del node.parent.children[node.key]
        for gone in _walk(node):
            gone.parent = None
            self.idle.pop(gone, None)
            self._pages.give_back(gone.page)
            self._on_removed(gone)

    def nodes(self) -> list[RadixNode]:
        """Returns all nodes except the root, parents first."""
        return [node for node in _walk(self.root) if node is not self.root]

    def check(self, holders: list[int]) -> list[str]:
        """Verifies the tree against `holders`, the number of page tables that hold each page. Returns the errors.

        Adds the tree's own references to `holders`.
        """
        nodes = self.nodes()
        wrong = [complaint for node in nodes for complaint in self._check_node(node, holders)]
        if {node for node in nodes if holders[node.page] == 0} != set(self.idle):
            wrong.append("the idle nodes are not the nodes without a holder")
        place = {node: index for index, node in enumerate(self.idle)}
        if any(place.get(child, -1) > place[node] for node in self.idle for child in node.children.values()):
            wrong.append("a node would be evicted before its child")
        for node in nodes:
            holders[node.page] += 1
        return wrong

    def _check_node(self, node: RadixNode, holders: list[int]) -> list[str]:
        wrong = []
        parent = node.parent
        if parent is None or parent.children.get(node.key) is not node:
            wrong.append(f"page {node.page}: not filed under its key")
        if len(node.key) != self.page_size + 2 * (parent is self.root):
            wrong.append(f"page {node.page}: its key has a wrong length")
        if sum(holders[child.page] for child in node.children.values()) > holders[node.page]:
            wrong.append(f"page {node.page}: fewer holders than its children")
        return wrong


def _walk(top: RadixNode) -> Iterator[RadixNode]:
    """Yields a node and its descendants, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
