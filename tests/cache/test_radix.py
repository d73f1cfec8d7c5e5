import pytest

from tureen.cache.pages import PagePool
from tureen.cache.radix import RadixTree

PLAIN = ("", "")


def _make_tree(num_pages=8, page_size=2):
    pool = PagePool(num_pages)
    return pool, RadixTree(pool, page_size, lambda node: None)


def _insert(pool, tree, token_ids, namespace=PLAIN):
    """Insert all full pages of `token_ids`, locked by the caller."""
    nodes = []
    for index in range(len(token_ids) // tree.page_size):
        page = pool.take()
        node = tree.insert(nodes[-1] if nodes else tree.root, tree.key(namespace, token_ids, index), page)
        if node.page != page:
            pool.give_back(page)
            tree.lock(node)
        nodes.append(node)
    return nodes


def _unlock(tree, nodes):
    for node in reversed(nodes):
        tree.unlock(node)


def test_the_longest_known_prefix_is_found_in_whole_pages():
    pool, tree = _make_tree()
    nodes = _insert(pool, tree, [1, 2, 3, 4, 5])
    assert tree.match(PLAIN, [1, 2, 3, 4, 5], 9) == nodes
    assert tree.match(PLAIN, [1, 2, 3, 9], 9) == nodes[:1]
    assert tree.match(PLAIN, [1, 2, 3, 4], 1) == nodes[:1]
    assert tree.match(PLAIN, [2, 1], 9) == []
    assert tree.match(PLAIN, [1], 9) == []


def test_prefixes_are_shared_only_inside_one_namespace():
    pool, tree = _make_tree()
    _insert(pool, tree, [1, 2, 3, 4], ("salt", ""))
    for namespace in (PLAIN, ("", "salt"), ("salt", "adapter"), ("sal", "t")):
        assert tree.match(namespace, [1, 2, 3, 4], 9) == []
    assert len(tree.match(("salt", ""), [1, 2, 3, 4], 9)) == 2


def test_the_prefix_used_longest_ago_is_evicted_first_and_leaves_before_their_parents():
    pool, tree = _make_tree()
    first = _insert(pool, tree, [1, 2, 3, 4])
    second = _insert(pool, tree, [1, 2, 5, 6])
    third = _insert(pool, tree, [7, 8])
    _unlock(tree, first)
    _unlock(tree, third)
    _unlock(tree, second)
    order = []
    while len(tree.idle):
        before = {id(n): n for n in (*first, *second, *third) if tree.is_attached(n)}
        tree.evict()
        order += [node.page for node in before.values() if not tree.is_attached(node)]
    assert order == [first[1].page, third[0].page, second[1].page, first[0].page]
    assert len(pool.free) == 8


def test_locked_prefixes_are_never_evicted():
    pool, tree = _make_tree()
    nodes = _insert(pool, tree, [1, 2, 3, 4])
    other = _insert(pool, tree, [1, 2, 3, 4, 5, 6])
    _unlock(tree, nodes)
    assert len(tree.idle) == 0
    _unlock(tree, other)
    assert len(tree.idle) == 3


def test_using_a_prefix_again_makes_it_the_newest():
    pool, tree = _make_tree()
    first, second = _insert(pool, tree, [1, 2]), _insert(pool, tree, [3, 4])
    _unlock(tree, first)
    _unlock(tree, second)
    tree.lock(first[0])
    tree.unlock(first[0])
    tree.evict()
    assert tree.match(PLAIN, [3, 4], 1) == []
    assert tree.match(PLAIN, [1, 2], 1) == first


def test_a_removed_branch_is_not_found_but_its_holders_keep_their_pages():
    pool, tree = _make_tree()
    top = _insert(pool, tree, [1, 2])
    branch = _insert(pool, tree, [1, 2, 3, 4])
    _unlock(tree, top)
    tree.remove(branch[0])
    assert tree.match(PLAIN, [1, 2, 3, 4], 2) == []
    assert [pool.count(node.page) for node in branch] == [1, 1]
    _unlock(tree, branch)
    assert (len(tree.idle), len(pool.free)) == (0, 8)
    tree.remove(branch[0])
    assert len(pool.free) == 8


def _rename(tree, nodes):
    nodes[1].key = (5, 6)


def _cut_off(tree, nodes):
    nodes[1].parent = None


def _lengthen(tree, nodes):
    del nodes[0].children[nodes[1].key]
    nodes[1].key = (3, 4, 5)
    nodes[0].children[nodes[1].key] = nodes[1]


def _forget_an_idle_one(tree, nodes):
    tree.idle.popitem()


def _turn_the_idle_around(tree, nodes):
    for node in list(reversed(tree.idle)):
        tree.idle.move_to_end(node)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_rename, "page {1}: not filed under its key"),
        (_cut_off, "page {1}: not filed under its key"),
        (_lengthen, "page {1}: its key has a wrong length"),
        (_forget_an_idle_one, "the idle nodes are not the nodes without a holder"),
        (_turn_the_idle_around, "a node would be evicted before its child"),
    ],
)
def test_the_check_says_what_is_wrong_with_a_tree(spoil, complaint):
    pool, tree = _make_tree()
    nodes = _insert(pool, tree, [1, 2, 3, 4])
    _unlock(tree, nodes)
    assert tree.check([0] * 8) == []
    spoil(tree, nodes)
    assert complaint.format(*(node.page for node in nodes)) in tree.check([0] * 8)


def test_the_check_says_where_a_page_has_fewer_holders_than_those_below_it():
    pool, tree = _make_tree()
    pages = [node.page for node in _insert(pool, tree, [1, 2, 3, 4])]
    holders = [int(page in pages) for page in range(8)]
    assert tree.check(list(holders)) == []
    holders[pages[1]] += 1
    assert tree.check(holders) == [f"page {pages[0]}: fewer holders than its children"]
    assert [holders[page] for page in pages] == [2, 3]


def test_ten_thousand_pages_deep_is_no_recursion():
    pool, tree = _make_tree(10_000, 1)
    nodes = _insert(pool, tree, list(range(10_000)))
    holders = [1] * 10_000
    assert tree.check(holders) == []
    _unlock(tree, nodes)
    tree.remove(nodes[0])
    assert len(pool.free) == 10_000
