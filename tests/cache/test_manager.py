import pytest

from tureen.cache.manager import CacheManager
from tureen.cache.windows import WindowPages

PLAIN = ("", "")


def _open(cache, token_ids, headroom=0, namespace=PLAIN):
    nodes = cache.match(namespace, token_ids, len(token_ids) - 1)
    return cache.open(namespace, nodes, len(token_ids), headroom=headroom)


def _run(cache, token_ids):
    """A sequence that computes all its tokens and ends."""
    table = _open(cache, token_ids)
    cache.publish(table, token_ids, len(token_ids))
    cache.close(table)
    return table


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_a_finished_sequence_leaves_its_full_pages_to_the_next_one(page_size):
    cache = CacheManager(64, page_size)
    token_ids = list(range(33))
    first = _run(cache, token_ids)
    second = _open(cache, token_ids)
    reused = 32 // page_size
    assert second.num_matched == reused
    assert second.pages[:reused] == first.pages[:reused]
    assert cache.check() == []
    cache.close(second)
    assert cache.num_available == 64


def test_a_table_says_whether_it_is_closed_and_for_how_many_tokens_it_has_room():
    cache = CacheManager(8, 4)
    table = _open(cache, [1] * 5)
    assert (table.is_open, table.room) == (True, 8)
    assert cache.grow(table, 9)
    assert table.room == 12
    cache.close(table)
    assert not table.is_open


def test_only_computed_full_pages_are_published():
    cache = CacheManager(8, 4)
    table = _open(cache, list(range(12)))
    for num_computed, published in [(0, 0), (3, 0), (4, 1), (7, 1), (11, 2)]:
        cache.publish(table, list(range(12)), num_computed)
        assert len(table.nodes) == published
        assert len(cache.match(PLAIN, list(range(12)), 12)) == published


def test_the_last_token_is_never_taken_from_the_cache():
    cache = CacheManager(8, 4)
    _run(cache, list(range(8)))
    assert len(cache.match(PLAIN, list(range(8)), 7)) == 1


def test_a_prefix_is_usable_where_the_window_pages_that_the_next_token_sees_are_still_there():
    cache = CacheManager(64, 4, windows=WindowPages(6, 4, window=7))
    tokens, others = list(range(33)), list(range(100, 133))

    def run(token_ids):
        nodes = cache.match(PLAIN, token_ids, len(token_ids) - 1)
        table = cache.open(PLAIN, nodes, len(token_ids), headroom=0, first_step=4)
        for end in range(4 * table.num_matched + 4, len(token_ids) + 1, 4):
            assert cache.grow(table, end)
            cache.publish(table, token_ids, end)
            assert cache.check() == []
        cache.close(table)
        return table.num_matched

    assert run(tokens) == 0
    assert len(cache.match(PLAIN, tokens[:16], 16)) == 4  # the last 6 of its 8 pages have kept their window pages
    assert len(cache.match(PLAIN, tokens[:12], 12)) == 0  # its next token sees page 1
    assert run(tokens) == 8  # its last token takes the window page of page 2
    assert len(cache.match(PLAIN, tokens[:16], 16)) == 0
    assert len(cache.match(PLAIN, tokens, 32)) == 8
    assert run(others) == 0
    assert len(cache.match(PLAIN, tokens, 32)) == 0
    assert cache.num_available == 64


@pytest.mark.parametrize("is_removed", [False, True])
def test_nodes_get_the_window_pages_that_were_loaded_for_them_unless_they_left_the_tree(is_removed):
    cache = CacheManager(64, 4, windows=WindowPages(20, 4, window=7))
    tokens = list(range(20))
    table = cache.open(PLAIN, [], 20, headroom=0, first_step=20)
    cache.publish(table, tokens, 20)
    cache.close(table)
    nodes = cache.known(PLAIN, tokens, 20)
    for node in nodes[3:]:
        cache.windows.drop(node)
    assert cache.num_usable(nodes) == 3
    table = cache.open(PLAIN, nodes, 20, headroom=0)  # of the token after them
    assert (table.live.first, len(table.live.pages)) == (3, 2)
    if is_removed:
        cache.tree.remove(nodes[4])
    cache.keep_windows(table)
    cache.close(table)
    assert cache.num_usable(cache.known(PLAIN, tokens, 20)) == (4 if is_removed else 5)
    assert cache.check() == []
    assert cache.windows.num_available == 20


def test_two_that_computed_the_same_tokens_end_up_with_the_same_window_pages():
    cache = CacheManager(64, 4, windows=WindowPages(20, 4, window=9))
    tables = [cache.open(PLAIN, [], 16, headroom=0, first_step=16) for _ in range(2)]
    for table in tables:
        cache.publish(table, list(range(16)), 16)
    assert tables[0].live.pages == tables[1].live.pages
    assert cache.windows.num_available == 20 - 2
    assert cache.check() == []


def test_two_that_computed_the_same_page_end_up_with_one():
    cache = CacheManager(8, 2)
    one, two = _open(cache, [1, 2, 3]), _open(cache, [1, 2, 3])
    assert one.pages[0] != two.pages[0]
    before = two.pages
    cache.publish(one, [1, 2, 3], 2)
    cache.publish(two, [1, 2, 3], 2)
    assert one.pages[0] == two.pages[0]
    assert two.pages != before
    assert cache.check() == []
    cache.close(one)
    cache.close(two)
    assert (len(cache.tree.idle), len(cache.pool.free)) == (1, 7)


def test_a_table_that_does_not_fit_changes_nothing():
    cache = CacheManager(4, 2)
    _run(cache, [1, 2, 3, 4])
    held = _open(cache, [9, 9, 9])
    assert _open(cache, [1, 2, 3, 4, 5, 6]) is None
    assert _open(cache, [1, 2, 3], headroom=1) is None
    assert cache.check() == []
    assert (len(cache.tree.idle), len(cache.pool.free)) == (2, 0)
    table = _open(cache, [1, 2, 3])
    assert table.num_matched == 1
    assert cache.grow(table, 4)
    assert not cache.grow(table, 5)
    assert cache.check() == []
    cache.close(table)
    cache.close(held)


def test_a_failed_sequence_leaves_nothing_that_it_computed():
    cache = CacheManager(8, 2)
    _run(cache, [1, 2, 3])
    table = _open(cache, [1, 2, 3, 4, 5, 6])
    cache.publish(table, [1, 2, 3, 4, 5, 6], 6)
    cache.close(table, distrust_from=table.num_matched)
    assert len(cache.match(PLAIN, [1, 2, 3, 4, 5, 6], 6)) == 1
    assert (cache.check(), cache.num_available) == ([], 8)


def test_nothing_is_published_below_pages_that_are_distrusted():
    cache = CacheManager(8, 2)
    token_ids = [1, 2, 3, 4, 5, 6]
    maker = _open(cache, token_ids)
    cache.publish(maker, token_ids, 2)
    user = _open(cache, token_ids)
    assert user.num_matched == 1
    cache.close(maker, distrust_from=0)
    cache.publish(user, token_ids, 6)
    assert not user.is_public
    assert cache.match(PLAIN, token_ids, 6) == []
    assert cache.check() == []
    cache.close(user)
    assert len(cache.pool.free) == 8


def test_without_prefix_cache_nothing_is_kept():
    cache = CacheManager(8, 2, prefix_cache=False)
    table = _run(cache, [1, 2, 3, 4])
    assert not table.nodes
    assert len(cache.pool.free) == 8


def test_flush_forgets_all_but_what_is_in_use():
    cache = CacheManager(8, 2)
    _run(cache, [1, 2, 3])
    _run(cache, [5, 6, 7, 8])
    table = _open(cache, [1, 2, 3])
    assert cache.flush() == 2
    assert len(cache.match(PLAIN, [1, 2, 3], 2)) == 1
    cache.close(table)
    assert cache.flush() == 1
    assert len(cache.pool.free) == 8


def test_the_check_says_when_a_table_does_not_hold_what_it_shares():
    cache = CacheManager(8, 2)
    table = _open(cache, [1, 2, 3])
    cache.publish(table, [1, 2, 3], 2)
    table.pages = table.pages[::-1]
    assert cache.check() == ["a page table does not hold the pages of its nodes"]


class Tier:
    """A lower tier that records what it is told."""

    def __init__(self):
        self.calls = []

    def save(self, nodes):
        self.calls.append(("save", [node.page for node in nodes]))

    def forget(self, nodes, first):
        self.calls.append(("forget", [node.page for node in nodes], first))

    def renew(self):
        self.calls.append(("renew",))


def test_a_table_that_saves_early_saves_its_prefix_once_at_each_publication_and_others_at_their_end():
    for saves_early in (True, False):
        cache = CacheManager(8, 4)
        cache.tier = tier = Tier()
        table = cache.open(PLAIN, [], 12, headroom=0, saves_early=saves_early)
        pages = list(table.pages)
        for num_computed in (3, 4, 7, 12):
            cache.publish(table, list(range(12)), num_computed)
        assert tier.calls == ([("save", pages[:1]), ("save", pages)] if saves_early else [])
        cache.close(table)
        assert tier.calls[-1] == ("save", pages)


def test_a_lower_tier_forgets_what_cannot_be_trusted_and_begins_again_after_a_flush_and_without_one_nothing_is_saved():
    cache = CacheManager(8, 4)
    table = cache.open(PLAIN, [], 12, headroom=0, saves_early=True)
    cache.publish(table, list(range(12)), 12)
    cache.tier = tier = Tier()
    pages = list(table.pages)
    cache.close(table, distrust_from=1)
    assert tier.calls == [("forget", pages, 1)]
    assert len(cache.match(PLAIN, list(range(12)), 12)) == 1
    cache.flush()
    assert tier.calls[1:] == [("renew",)]


def test_a_sequence_that_begins_with_a_saved_state_makes_it_the_one_used_last():
    cache = CacheManager(8, 4, states=range(2))
    prompts = [[number] * 4 for number in range(2)]
    for prompt in prompts:
        table = _open(cache, prompt)
        cache.publish(table, prompt, 4)
        assert cache.keep_state(table, 4, cache.states.take(())) is table.nodes[0]
        cache.close(table)
    assert len(cache.match(PLAIN, prompts[0], 4)) == 1
    cache.close(cache.open(PLAIN, cache.match(PLAIN, prompts[0], 4), 5, headroom=0))
    cache.states.give_back(cache.states.take(()))
    assert [len(cache.match(PLAIN, prompt, 4)) for prompt in prompts] == [1, 0]
    assert cache.check() == []


def test_a_state_after_a_page_that_is_not_published_or_was_removed_is_given_back():
    cache = CacheManager(8, 4, states=range(2))
    table = _open(cache, list(range(8)))
    cache.publish(table, list(range(8)), 4)
    assert cache.keep_state(table, 8, cache.states.take(())) is None
    cache.tree.remove(table.nodes[0])
    assert cache.keep_state(table, 4, cache.states.take(())) is None
    assert sorted(cache.states.free) == [0, 1]
