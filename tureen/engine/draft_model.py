"""Guesses tokens with a smaller model that shares the page table of the engine's model:
docs/decisions/0156-a-draft-model-shares-pages.md. Guesses change no token. The clock only measures their cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from tureen.cache.manager import PageTable
from tureen.contract.params import without_history
from tureen.contract.runner import Batch, Row, RowOutput, Runner, SlotState
from tureen.contract.types import NO_TOKEN
from tureen.engine.sequence import Sequence as Generation

RATE = 0.1  # of the moving averages of times
MOST_SLOWER = 4  # a round that takes more than this multiple of the known time was delayed by something else
FIRST_ROUND_COST, FIRST_TOKEN_COST = 0.1, 0.02
"""The assumed time of a round, and of a token that is caught up on, in plain steps, until they are measured."""
MOST_CATCHING_UP = 4  # tokens of a row in a round whose time is that of a guess
MOST_TOKENS = 64  # of a round, because the requests that run wait for those who catch up


class Written(NamedTuple):
    """The content of a page of the draft model's KV cache."""

    prefix: int  # hash of all tokens before the page
    token_ids: list[int]  # in order, from the first position of the page on


class Turn(NamedTuple):
    """What the draft model computes for one sequence in a round."""

    of: int  # index of the sequence among those that ask
    start: int
    token_ids: list[int]
    draws: bool


class DraftModel:
    """A draft model with its KV cache, and what each page of that cache holds."""

    def __init__(
        self, runner: Runner, vocab_size: int, token_budget: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`vocab_size`: of the engine's model. `token_budget`: of a step, which a round does not exceed either."""
        capacity = runner.capacity()
        self._runner = runner
        self._page_size, self._context_len = capacity.page_size, capacity.context_len
        self._vocab_size = min(vocab_size, capacity.vocab_size)
        self._token_budget = min(token_budget, MOST_TOKENS)
        self._clock = clock
        self._written: dict[int, Written] = {}  # by page
        self._prefixes = WeakKeyDictionary[Generation, list[int]]()  # hash of all tokens before each page
        self._verified = WeakKeyDictionary[Generation, tuple[PageTable, tuple[int, ...]]]()
        self._slots = WeakValueDictionary[int, Generation]()
        self.round_s: dict[int, float] = {}  # of a round that computes few tokens a row, by the number of rows
        self.token_s = 0.0  # of a token that is caught up on

    def num_missing(self, sequence: Generation) -> int:
        """Return the number of tokens that must be computed before the first guess: at least 1, the last one."""
        return sequence.num_tokens - self._num_known(sequence)

    def takes(self, sequence: Generation, most: int) -> bool:
        """Return whether the draft model can guess `most` tokens of a sequence: pictures are unknown to it."""
        fits = sequence.num_tokens + most <= self._context_len
        return fits and sequence.embedded is None

    def draft(self, asking: Sequence[Generation], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return at most `counts[i]` guesses of `asking[i]`, which holds pages for that many more tokens.

        A sequence gets no guesses while it lacks more tokens than a round computes. The last guess is NO_TOKEN if the
        draft model failed for this row, or drew a token that the engine's model does not have.
        """
        guesses: list[list[int]] = [[] for _ in asking]
        turns = self._first_turns(asking)
        while turns:
            for turn, output in zip(turns, self._run(asking, turns), strict=True):
                self._note(asking[turn.of], turn.start, turn.token_ids)
                if turn.draws:
                    token_id = output.token_ids[0] if output.token_ids else NO_TOKEN
                    guesses[turn.of].append(token_id if token_id < self._vocab_size else NO_TOKEN)
            turns = [
                Turn(turn.of, turn.start + len(turn.token_ids), guessed[-1:], draws=True)
                for turn in turns
                if (guessed := guesses[turn.of])
                and len(guessed) < counts[turn.of]
                and not _ends(asking[turn.of], guessed)
            ]
        return [tuple(guessed) for guessed in guesses]

    def expect(self, plain_s: float, share: float = 0.0) -> None:
        """Move the known times by `share` towards the assumed ones, so that a slow model is tried again; set them if
        none are known. `plain_s`: the time of a step without guesses."""
        if not self.round_s:
            self.round_s[1], self.token_s = FIRST_ROUND_COST * plain_s, FIRST_TOKEN_COST * plain_s
        self.token_s += share * (FIRST_TOKEN_COST * plain_s - self.token_s)
        for num_rows, known_s in self.round_s.items():
            self.round_s[num_rows] = known_s + share * (FIRST_ROUND_COST * plain_s - known_s)

    def expected_s(self, num_rows: int) -> float:
        """Return the time of a round over this number of rows, or over the nearest number that is known."""
        return self.round_s[min(self.round_s, key=lambda known: abs(known - num_rows))]

    def clear(self) -> None:
        """Drop all that was computed, and return its memory to the system."""
        self._written.clear()
        self._verified.clear()
        self._runner.call("forget")

    def close(self) -> None:
        self._runner.close()

    def _first_turns(self, asking: Sequence[Generation]) -> list[Turn]:
        """Return the turns of the first round: those who catch up get the rest of the budget."""
        turns, budget = [], self._token_budget
        missing = [self.num_missing(sequence) for sequence in asking]
        for index in sorted(range(len(asking)), key=missing.__getitem__):
            sequence = asking[index]
            start = sequence.num_tokens - missing[index]
            end = min(start + budget, sequence.num_tokens)
            token_ids = sequence.token_ids[start:end]
            if token_ids and max(token_ids) < self._vocab_size:  # a client may send ids that only the model has
                turns.append(Turn(index, start, token_ids, draws=end == sequence.num_tokens))
                budget -= end - start
        return turns

    def _run(self, asking: Sequence[Generation], turns: list[Turn]) -> tuple[RowOutput, ...]:
        rows, new_slots = [], []
        for turn in turns:
            sequence = asking[turn.of]
            assert sequence.table is not None
            if self._slots.get(sequence.slot) is not sequence:
                self._slots[sequence.slot] = sequence
                new_slots.append(_slot_state(sequence))
            rows.append(Row(sequence.slot, tuple(turn.token_ids), turn.start, sequence.table.pages, turn.draws))
        start_s = self._clock()
        outputs = self._runner.submit(Batch(tuple(rows), tuple(new_slots))).result().rows
        self._learn(turns, self._clock() - start_s)
        return outputs

    def _learn(self, turns: list[Turn], seconds: float) -> None:
        if max(len(turn.token_ids) for turn in turns) <= MOST_CATCHING_UP:
            self.round_s[len(turns)] = _learned(self.expected_s(len(turns)), seconds)
        else:
            self.token_s = _learned(self.token_s, seconds / sum(len(turn.token_ids) for turn in turns))

    def _num_known(self, sequence: Generation) -> int:
        """Return how many leading tokens, without the last one, the draft model's pages hold."""
        assert sequence.table is not None
        token_ids, table = sequence.token_ids, sequence.table
        verified = self._verified_pages(sequence, table)
        num_verified = len(verified)
        count = num_verified * self._page_size
        prefixes = self._prefixes_of(sequence)[num_verified:]
        for prefix, page in zip(prefixes, table.pages[num_verified:], strict=False):
            written = self._written.get(page)
            if written is None or written.prefix != prefix:
                break
            here = token_ids[count : count + self._page_size]
            pairs = zip(written.token_ids, here, strict=False)
            num_equal = len(here) if written.token_ids == here else len(list(takewhile(_are_equal, pairs)))
            count += num_equal
            if num_equal < self._page_size:
                break
        self._verified[sequence] = table, table.pages[: count // self._page_size]
        return min(count, len(token_ids) - 1)

    def _verified_pages(self, sequence: Generation, table: PageTable) -> tuple[int, ...]:
        """Return the leading pages that were compared before: no other sequence writes to them while the table has
        them."""
        known_table, pages = self._verified.get(sequence, (table, ()))
        return pages if known_table is table and table.pages[: len(pages)] == pages else ()

    def _prefixes_of(self, sequence: Generation) -> list[int]:
        prefixes, size = self._prefixes.setdefault(sequence, [0]), self._page_size
        for start in range((len(prefixes) - 1) * size, sequence.num_tokens - size + 1, size):
            prefixes.append(_next_prefix(Written(prefixes[-1], sequence.token_ids[start : start + size])))
        return prefixes

    def _note(self, sequence: Generation, start: int, token_ids: list[int]) -> None:
        """Record that tokens, guesses among them, were written to the pages of a sequence."""
        assert sequence.table is not None
        pages, prefixes = sequence.table.pages, self._prefixes_of(sequence)
        for position, token_id in enumerate(token_ids, start):
            index, offset = divmod(position, self._page_size)
            if offset == 0:  # after guesses, the page before has the tokens that the hash needs
                is_known = index < len(prefixes)
                prefix = prefixes[index] if is_known else _next_prefix(self._written[pages[index - 1]])
                self._written[pages[index]] = Written(prefix, [])
            held = self._written[pages[index]].token_ids
            held[offset:] = [token_id]


def _ends(sequence: Generation, guessed: list[int]) -> bool:
    return guessed[-1] == NO_TOKEN or guessed[-1] in sequence.terms.end_token_ids


def _learned(known_s: float, seconds: float) -> float:
    return known_s + RATE * (min(seconds, MOST_SLOWER * known_s) - known_s)


def _are_equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def _next_prefix(page: Written) -> int:
    """Return the hash of all tokens before the page that follows a full one."""
    return hash((page.prefix, *page.token_ids))


def _slot_state(sequence: Generation) -> SlotState:
    """Return what decides a token in the draft model: the seed, and the parameters that do not follow the output."""
    params = without_history(sequence.request.params)
    return SlotState(sequence.slot, params, sequence.request.seed, prompt_ids=(), output_ids=(), end_token_ids=())
