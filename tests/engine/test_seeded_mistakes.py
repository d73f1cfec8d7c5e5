"""Mistakes planted in the engine and its cache; the invariants or the answers must show each."""

import msgspec
import pytest
from samples import some
from world import BooksWrong, simulate

from tureen.cache.manager import CacheManager, PageTable
from tureen.cache.pages import PagePool
from tureen.cache.radix import RadixNode, RadixTree
from tureen.cache.windows import WindowPages
from tureen.contract.types import NO_TOKEN
from tureen.engine import encoders, output
from tureen.engine.constraint import Constraint
from tureen.engine.control import Control
from tureen.engine.embedded import Embedded
from tureen.engine.encoders import Encoders
from tureen.engine.grammars import Grammars
from tureen.engine.hidden import HiddenStateQueue
from tureen.engine.scheduler import Scheduler
from tureen.engine.scores import ScoreQueue
from tureen.engine.sequence import Sequence
from tureen.grammar_service.masks import MaskThread
from tureen.runner.fake import FakeRunner

PAGE_SIZES = (1, 2, 16)
SEEDS = range(120)
FINDERS = (0, 1, 4, 6, 10, 21, 72)
"""Seeds that find all of the mistakes. If they find none, the others are tried."""


def _is_caught(seeds, *, window=0) -> bool:
    for seed in seeds:
        try:
            fault_rate = 0.15 * (seed % 2)
            sizes = {"page_size": PAGE_SIZES[seed % 3], "window": window, "spare_tokens": seed % 4 * 20}
            world = simulate(seed, fault_rate=fault_rate, **sizes)
            world.check_answers(may_fail=fault_rate > 0)
        except (Exception, BooksWrong):  # noqa: BLE001 - however it shows
            return True
    return False


def _tree_takes_no_reference(monkeypatch):
    def insert(self, parent, key, page):
        return parent.children.setdefault(key, RadixNode(key, page, parent))

    monkeypatch.setattr(RadixTree, "insert", insert)


def _reused_pages_are_not_locked(monkeypatch):
    monkeypatch.setattr(RadixTree, "lock", lambda self, node: None)


def _a_locked_page_stays_evictable(monkeypatch):
    monkeypatch.setattr(RadixTree, "lock", lambda self, node: self._pages.share(node.page))


def _unlock_is_forgotten(monkeypatch):
    monkeypatch.setattr(RadixTree, "unlock", lambda self, node: None)


def _own_pages_are_given_back_twice(monkeypatch):
    close = CacheManager.close

    def twice(self, table, **options):
        own = table.pages[len(table.nodes) :]
        close(self, table, **options)
        for page in own:
            self.pool.give_back(page)

    monkeypatch.setattr(CacheManager, "close", twice)


def _the_free_list_gets_a_page_twice(monkeypatch):
    give_back = PagePool.give_back

    def twice(self, page):
        left = give_back(self, page)
        if left == 0:
            self._free.append(page)
        return left

    monkeypatch.setattr(PagePool, "give_back", twice)


def _own_pages_leak(monkeypatch):
    close = CacheManager.close

    def leak(self, table, **options):
        table.pages = table.pages[: len(table.nodes)]
        close(self, table, **options)

    monkeypatch.setattr(CacheManager, "close", leak)


def _one_page_too_few(monkeypatch):
    monkeypatch.setattr(CacheManager, "num_pages_for", lambda self, tokens: tokens // self.page_size)


def _a_table_claims_room_for_a_token_more(monkeypatch):
    grow = CacheManager.grow

    def claim(self, table, num_tokens):
        is_grown = grow(self, table, num_tokens)
        table.room += 1
        return is_grown

    monkeypatch.setattr(CacheManager, "grow", claim)


def _rows_carry_the_pages_rotated_by_one(monkeypatch):
    make_row = Sequence.row

    def rotated(self, *args):
        row = make_row(self, *args)
        return msgspec.structs.replace(row, pages=(*row.pages[1:], row.pages[0]))

    monkeypatch.setattr(Sequence, "row", rotated)


def _rows_carry_a_page_that_was_replaced(monkeypatch):
    monkeypatch.setattr(PageTable, "replace", lambda self, index, page: None)


def _pages_are_published_before_they_are_computed(monkeypatch):
    publish = CacheManager.publish

    def early(self, table, token_ids, num_computed):
        publish(self, table, token_ids, min(num_computed + self.page_size, len(table.pages) * self.page_size))

    monkeypatch.setattr(CacheManager, "publish", early)


def _pages_are_published_under_the_next_tokens(monkeypatch):
    key = RadixTree.key
    monkeypatch.setattr(
        RadixTree, "key", lambda self, space, tokens, index: key(self, space, [*tokens[1:], tokens[0]], index)
    )


def _namespaces_are_ignored(monkeypatch):
    key = RadixTree.key
    monkeypatch.setattr(RadixTree, "key", lambda self, space, tokens, index: key(self, ("", ""), tokens, index))


def _parents_are_evicted_before_children(monkeypatch):
    def newest(self):
        node, _ = self._idle.popitem(last=True)
        del node.parent.children[node.key]
        node.parent = None
        self._pages.give_back(node.page)

    monkeypatch.setattr(RadixTree, "evict", newest)


def _the_whole_prompt_is_reused(monkeypatch):
    monkeypatch.setattr(Sequence, "max_reused", property(lambda self: len(self.token_ids)))


def _reuse_ignores_prompt_logprobs(monkeypatch):
    monkeypatch.setattr(Sequence, "max_reused", property(lambda self: len(self.token_ids) - 1))


def _the_sampler_forgets_the_output_at_resume(monkeypatch):
    state = Sequence.slot_state

    def forget(self):
        import msgspec

        return msgspec.structs.replace(state(self), output_ids=())

    monkeypatch.setattr(Sequence, "slot_state", forget)


def _a_preempted_sequence_keeps_its_place(monkeypatch):
    stop = Scheduler._stop_running

    def keep(self, sequence, **options):
        computed = sequence.num_computed
        stop(self, sequence, **options)
        sequence.num_computed = computed

    monkeypatch.setattr(Scheduler, "_stop_running", keep)


def _slots_are_not_given_back(monkeypatch):
    stop = Scheduler._stop_running

    def keep(self, sequence, **options):
        stop(self, sequence, **options)
        self._free_slots.pop()

    monkeypatch.setattr(Scheduler, "_stop_running", keep)


def _followers_wait_for_leaders_that_are_gone(monkeypatch):
    def is_following(self):
        return self.leader is not None and len(self.leader[0].nodes) < self.leader[1]

    monkeypatch.setattr(Sequence, "is_following", property(is_following))


def _embeddings_are_published(monkeypatch):
    opened = CacheManager.open
    monkeypatch.setattr(
        CacheManager, "open", lambda self, *given, is_public, **options: opened(self, *given, **options)
    )


def _embeddings_of_a_later_chunk_are_those_of_the_first(monkeypatch):
    between = Embedded.between
    monkeypatch.setattr(Embedded, "between", lambda self, start, end: between(self, 0, end - start))


def _pictures_are_all_alike_to_the_prefix_cache(monkeypatch):
    init = Sequence.__init__

    def without(self, request, *args):
        init(self, request, *args)
        self.token_ids = [max(token, NO_TOKEN) for token in self.token_ids]

    monkeypatch.setattr(Sequence, "__init__", without)


def _a_picture_becomes_what_the_one_before_became(monkeypatch):
    monkeypatch.setattr(encoders, "_keys", lambda sequence: [("", "") for _ in sequence.request.media])
    begin = Encoders._begin
    monkeypatch.setattr(Encoders, "_begin", lambda self: begin(self)._replace(key=("", "")))


def _who_is_aborted_still_waits_for_its_picture(monkeypatch):
    monkeypatch.setattr(Encoders, "remove", lambda self, sequence: None)


def _hidden_states_are_sent_again_after_a_preemption(monkeypatch):
    def asked_from(self, start, end, *, reaches_end):
        return 0 if self._wanted == "all" else None

    monkeypatch.setattr(HiddenStateQueue, "asked_from", asked_from)


def _reuse_ignores_hidden_states(monkeypatch):
    monkeypatch.setattr(HiddenStateQueue, "first_needed", lambda self: None)


def _a_pause_is_forgotten(monkeypatch):
    monkeypatch.setattr(Control, "pause", lambda self, mode: 0)


def _forced_tokens_are_not_scored(monkeypatch):
    monkeypatch.setattr(ScoreQueue, "ask", lambda self, position: None)


def _the_sampler_does_not_hear_of_forced_tokens(monkeypatch):
    monkeypatch.setattr(FakeRunner, "_hear_of", lambda self, row: None)


def _a_mask_is_that_of_another_slot(monkeypatch):
    start = MaskThread.start

    def mix_up(self, fills):
        return start(self, dict(zip(fills, reversed(fills.values()), strict=True)))

    monkeypatch.setattr(MaskThread, "start", mix_up)


def _a_compilation_is_not_given_up(monkeypatch):
    monkeypatch.setattr(Grammars, "remove", lambda self, sequence: self.waiting.pop(sequence))


def _ignored_eos_ends_a_constrained_output(monkeypatch):
    monkeypatch.setattr(Constraint, "fill_mask", lambda self, mask: self._grammar.fill_mask(mask))


def _what_is_asked_of_a_complete_output_is_not_computed(monkeypatch):
    monkeypatch.setattr(Sequence, "needs_run", property(lambda self: self.ended is None))


def _a_stop_among_forced_tokens_is_overlooked(monkeypatch):
    append = output.append

    def overlook(sequence, token_id, context_len, *, is_drawn):
        reason = append(sequence, token_id, context_len, is_drawn=is_drawn)
        is_cut = reason is not None and sequence.num_output >= sequence.request.max_new_tokens
        return reason if is_drawn or is_cut or sequence.constraint.is_done else None

    monkeypatch.setattr(output, "append", overlook)


def _a_window_slides_a_page_early(monkeypatch):
    first_seen = WindowPages.first_seen
    monkeypatch.setattr(WindowPages, "first_seen", lambda self, num_tokens: first_seen(self, num_tokens + 16))


def _a_prefix_is_used_without_its_window(monkeypatch):
    monkeypatch.setattr(CacheManager, "num_usable", lambda self, nodes: len(nodes))


def _window_pages_of_a_prefix_are_not_held(monkeypatch):
    monkeypatch.setattr(WindowPages, "_share", lambda self, node: None)


def _window_pages_never_become_idle(monkeypatch):
    def give_back(self, live, nodes, index):
        self.pool.give_back(live.pages[index - live.first])

    monkeypatch.setattr(WindowPages, "_give_back", give_back)


def _a_node_that_is_removed_keeps_its_window_page(monkeypatch):
    monkeypatch.setattr(WindowPages, "drop", lambda self, node: None)


def _all_tokens_of_a_prompt_take_window_pages(monkeypatch):
    monkeypatch.setattr(WindowPages, "slide", lambda self, live, nodes, num_tokens: None)


def _window_pages_are_not_counted(monkeypatch):
    monkeypatch.setattr(WindowPages, "num_available", 1 << 30)


WITH_WINDOWS = [
    _a_window_slides_a_page_early,
    _a_prefix_is_used_without_its_window,
    _window_pages_of_a_prefix_are_not_held,
    _window_pages_never_become_idle,
    _a_node_that_is_removed_keeps_its_window_page,
    _all_tokens_of_a_prompt_take_window_pages,
    _window_pages_are_not_counted,
]
MISTAKES = [
    _forced_tokens_are_not_scored,
    _the_sampler_does_not_hear_of_forced_tokens,
    _a_mask_is_that_of_another_slot,
    _a_compilation_is_not_given_up,
    _ignored_eos_ends_a_constrained_output,
    _what_is_asked_of_a_complete_output_is_not_computed,
    _a_stop_among_forced_tokens_is_overlooked,
    _embeddings_are_published,
    _embeddings_of_a_later_chunk_are_those_of_the_first,
    _pictures_are_all_alike_to_the_prefix_cache,
    _a_picture_becomes_what_the_one_before_became,
    _who_is_aborted_still_waits_for_its_picture,
    _hidden_states_are_sent_again_after_a_preemption,
    _reuse_ignores_hidden_states,
    _a_pause_is_forgotten,
    _tree_takes_no_reference,
    _reused_pages_are_not_locked,
    _a_locked_page_stays_evictable,
    _unlock_is_forgotten,
    _own_pages_are_given_back_twice,
    _the_free_list_gets_a_page_twice,
    _own_pages_leak,
    _one_page_too_few,
    _a_table_claims_room_for_a_token_more,
    _rows_carry_the_pages_rotated_by_one,
    _rows_carry_a_page_that_was_replaced,
    _pages_are_published_before_they_are_computed,
    _pages_are_published_under_the_next_tokens,
    _namespaces_are_ignored,
    _parents_are_evicted_before_children,
    _the_whole_prompt_is_reused,
    _reuse_ignores_prompt_logprobs,
    _the_sampler_forgets_the_output_at_resume,
    _a_preempted_sequence_keeps_its_place,
    _slots_are_not_given_back,
    _followers_wait_for_leaders_that_are_gone,
]


@pytest.mark.sampled
def test_without_a_mistake_nothing_is_caught():
    assert not _is_caught({*FINDERS, *some(SEEDS, 12)})
    assert not _is_caught(some(SEEDS, 12), window=11)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_planted_mistake_is_caught(mistake, monkeypatch):
    mistake(monkeypatch)
    assert _is_caught((*FINDERS, *SEEDS))


@pytest.mark.parametrize("mistake", WITH_WINDOWS, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_planted_mistake_with_windows_is_caught(mistake, monkeypatch):
    mistake(monkeypatch)
    assert _is_caught(SEEDS, window=11)
