"""Decides which states of layers without attention a row reads, writes and saves for later requests."""

from __future__ import annotations

import msgspec

from tureen.cache.manager import CacheManager
from tureen.cache.radix import RadixNode
from tureen.cache.windows import WindowPages
from tureen.contract.runner import Capacity, Row
from tureen.engine.sequence import Sequence

SAVE_EVERY = 2048
"""Minimum number of prompt tokens between two saved states."""


def make_cache(capacity: Capacity, *, prefix_cache: bool) -> CacheManager:
    """Makes the accounts of a runner's pages and saved states. The first states belong to slots and to a test step."""
    size = capacity.page_size
    saved = range(2 * capacity.max_rows + 1, capacity.num_states) if capacity.num_states else None
    windows = WindowPages(capacity.num_window_pages, size, capacity.window)
    return CacheManager(capacity.num_pages, size, prefix_cache=prefix_cache, states=saved, windows=windows)


class OwnState:
    """The states of a running sequence: the state after its last computed token, and the states that its row saves."""

    def __init__(self, number: int, shared_end: int) -> None:
        self.number = number  # -1: nothing is computed
        self.shared_end = shared_end  # tokens at its start whose pages another sequence has computed
        self.saving: list[tuple[int, int]] = []  # (n, number): the row saves the state after n tokens of the sequence
        self.newest: RadixNode | None = None  # holds the last state of its output


class StateKeeper:
    """Adds states to rows, and puts the states that rows save into the prefix cache.

    A sequence writes the two states of its slot in turn, so a failed step can run again. States are saved at the last
    page border of a prompt, from which the next turn of a conversation may continue; at the last one so far of its
    output; where the prompt diverges from pages that another sequence computed; and at intervals in a long prompt.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._own: dict[Sequence, OwnState] = {}  # of all that run

    def begin(self, sequence: Sequence) -> None:
        """Called when a sequence has taken a slot and a page table."""
        if sequence.table is not None:
            state = sequence.table.nodes[-1].state if sequence.table.nodes else None
            known = self._cache.known(sequence.namespace, sequence.token_ids, sequence.max_reused)
            shared_end = len(known) * self._cache.page_size
            self._own[sequence] = OwnState(-1 if state is None else state.number, shared_end)

    def end(self, sequence: Sequence) -> None:
        """Called when a sequence frees its slot."""
        own = self._own.pop(sequence, None)
        if own is not None:
            self._give_back(own)

    def take(self) -> int | None:
        """Takes the number of a state to write, which no running sequence begins with. None: all are in use."""
        return self._cache.states.take({own.number for own in self._own.values()})

    def with_states(self, sequence: Sequence, row: Row) -> Row:
        """Returns the next row of a sequence with the states that it reads, writes and saves."""
        own = self._own.get(sequence)
        if own is None:
            return row
        self._give_back(own)  # of a row that failed
        if sequence.table is not None and sequence.table.is_public:
            for border in self._borders(sequence, own, row.start + len(row.token_ids)):
                number = self.take()
                if number is not None:
                    own.saving.append((border, number))
        state_to = 2 * row.slot + (own.number == 2 * row.slot)
        saves = tuple((border - row.start, number) for border, number in own.saving)
        return msgspec.structs.replace(row, state_from=own.number, state_to=state_to, state_saves=saves)

    def computed(self, sequence: Sequence, row: Row) -> None:
        """Called after a row's results have arrived and its pages are published."""
        own = self._own.get(sequence)
        if own is None or sequence.table is None:
            return
        own.number = row.state_to
        saved, own.saving = own.saving, []
        for border, number in saved:
            node = self._cache.keep_state(sequence.table, border, number)
            if node is not None and border >= sequence.terms.num_prompt:
                if own.newest is not None:
                    self._cache.states.drop(own.newest)
                own.newest = node

    def _borders(self, sequence: Sequence, own: OwnState, end: int) -> list[int]:
        """Returns the numbers of tokens after which a row up to `end` saves a state, ascending."""
        size, start, num_prompt = self._cache.page_size, sequence.num_computed, sequence.terms.num_prompt
        every = max(1, SAVE_EVERY // size) * size
        borders = {(num_prompt - 1) // size * size, own.shared_end, *range(every, num_prompt, every)}
        if end >= num_prompt:
            borders.add(end // size * size)
        return sorted(border for border in borders if start < border <= end)

    def _give_back(self, own: OwnState) -> None:
        for _, number in own.saving:
            self._cache.states.give_back(number)
        own.saving = []
