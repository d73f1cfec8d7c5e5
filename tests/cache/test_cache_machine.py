"""Any sequence of operations on pages and radix tree, against a model made of a dict and two lists."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tureen.cache.manager import CacheManager, PageTable

NUM_PAGES = 10
NAMESPACES = [("", ""), ("salt", "")]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@dataclass
class Held:
    """A page table and what the model says of it."""

    table: PageTable
    namespace: tuple
    tokens: list
    pages: list
    num_nodes: int
    num_computed: int
    is_public: bool = True


class CacheMachine(RuleBasedStateMachine):
    """`tree` maps (namespace, all tokens up to the page's end) to the page; `idle` lists keys, oldest use first."""

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size):
        self.size = page_size
        self.cache = CacheManager(NUM_PAGES, page_size)
        self.tree, self.idle, self.held = {}, [], []

    # -- the model's own bookkeeping

    def _keys(self, namespace, tokens, count):
        return [(namespace, tuple(tokens[: (i + 1) * self.size])) for i in range(count)]

    def _holders(self, page):
        return sum(held.pages.count(page) for held in self.held)

    def _free(self):
        used = set(self.tree.values()) | {page for held in self.held for page in held.pages}
        return NUM_PAGES - len(used)

    def _forget(self, top):
        for key in [key for key in self.tree if key[0] == top[0] and key[1][: len(top[1])] == top[1]]:
            del self.tree[key]
            if key in self.idle:
                self.idle.remove(key)

    def _evict_for(self, missing):
        for _ in range(missing - self._free()):
            oldest = self.idle.pop(0)
            assert [key for key in self.tree if key[1][: len(oldest[1])] == oldest[1] and key[0] == oldest[0]] == [
                oldest
            ]
            del self.tree[oldest]

    def _lock(self, keys):
        for key in keys:
            if key in self.idle:
                self.idle.remove(key)

    def _unlock(self, keys_and_pages):
        for key, page in reversed(keys_and_pages):
            if self.tree.get(key) == page and self._holders(page) == 0 and key not in self.idle:
                self.idle.append(key)

    # -- operations

    @rule(tokens=prompts, namespace=st.sampled_from(NAMESPACES), headroom=st.integers(0, 3))
    def open(self, tokens, namespace, headroom):
        limit = (len(tokens) - 1) // self.size
        keys = []
        for key in self._keys(namespace, tokens, limit):
            if key not in self.tree:
                break
            keys.append(key)
        nodes = self.cache.match(namespace, tokens, len(tokens) - 1)
        assert [node.page for node in nodes] == [self.tree[key] for key in keys]
        table = self.cache.open(namespace, nodes, len(tokens), headroom=headroom)
        missing = -(-len(tokens) // self.size) - len(keys)
        self._lock(keys)
        pages = [self.tree[key] for key in keys]
        fits = missing + headroom <= self._free() + len(self.idle)
        assert (table is not None) == fits
        if table is None:
            self._unlock(list(zip(keys, pages, strict=True)))
            return
        self._evict_for(missing)
        self._add_pages(table, pages, missing)
        self.held.append(Held(table, namespace, list(tokens), list(table.pages), len(keys), len(keys) * self.size))

    def _add_pages(self, table, pages, missing):
        new = table.pages[len(pages) :]
        assert list(table.pages[: len(pages)]) == pages
        assert len(new) == len(set(new)) == missing
        used = set(self.tree.values()) | {page for held in self.held for page in held.pages}
        assert not used & set(new), "a page was handed out that somebody holds"

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(1, 4))
    def grow(self, data, more):
        held = data.draw(st.sampled_from(self.held))
        tokens = held.tokens + data.draw(st.lists(st.integers(0, 1), min_size=more, max_size=more))
        missing = max(0, -(-len(tokens) // self.size) - len(held.pages))
        fits = missing <= self._free() + len(self.idle)
        assert self.cache.grow(held.table, len(tokens)) == fits
        if fits:
            self._evict_for(missing)
            self._add_pages(held.table, held.pages, missing)
            held.tokens, held.pages = tokens, list(held.table.pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute_and_publish(self, data):
        held = data.draw(st.sampled_from(self.held))
        held.num_computed = data.draw(st.integers(held.num_computed, len(held.tokens)))
        self.cache.publish(held.table, held.tokens, held.num_computed)
        keys = self._keys(held.namespace, held.tokens, held.num_computed // self.size)
        while held.is_public and held.num_nodes < len(keys):
            at = held.num_nodes
            if at and self.tree.get(keys[at - 1]) != held.pages[at - 1]:
                held.is_public = False
                break
            if keys[at] in self.tree:
                self._lock([keys[at]])
                held.pages[at] = self.tree[keys[at]]
            else:
                self.tree[keys[at]] = held.pages[at]
            held.num_nodes += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), distrust=st.sampled_from([None, None, None, 0, 1]))
    def close(self, data, distrust):
        held = data.draw(st.sampled_from(self.held))
        self.cache.close(held.table, distrust_from=distrust)
        keys = self._keys(held.namespace, held.tokens, held.num_nodes)
        if distrust is not None and distrust < len(keys) and self.tree.get(keys[distrust]) == held.pages[distrust]:
            self._forget(keys[distrust])
        self.held.remove(held)
        self._unlock(list(zip(keys, held.pages, strict=False)))

    @rule()
    def flush(self):
        assert self.cache.flush() == len(self.idle)
        for key in self.idle:
            del self.tree[key]
        self.idle.clear()

    # -- what must hold after each

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert cache.check() == []
        assert len(cache.pool.free) == self._free()
        assert len(cache.tree.idle) == len(self.idle)
        for page in range(NUM_PAGES):
            in_tree = list(self.tree.values()).count(page)
            assert in_tree <= 1
            assert cache.pool.count(page) == self._holders(page) + in_tree
        for held in self.held:
            assert (list(held.table.pages), len(held.table.nodes)) == (held.pages, held.num_nodes)


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
