"""Guesses tokens with a smaller model that shares the page table of the engine's model:
docs/decisions/0156-a-draft-model-shares-pages.md. Guesses change no token. The clock only measures their cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from tureen.contract.params import without_history
from tureen.contract.runner import Batch, Row, RowOutput, Runner, SlotState
from tureen.engine.sequence import Sequence as Generation

RATE = 0.1  # of the moving averages of times
MOST_CATCHING_UP = 4  # tokens of a row in a round whose time is that of a guess


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
        """`vocab_size`: of the engine's model. `token_budget`: maximum tokens of a round."""
        capacity = runner.capacity()
        self._runner = runner
        self._page_size, self._context_len = capacity.page_size, capacity.context_len
        self._vocab_size = min(vocab_size, capacity.vocab_size)
        self._token_budget = token_budget
        self._clock = clock
        self._written: dict[int, Written] = {}  # by page
        self._prefixes = WeakKeyDictionary[Generation, list[int]]()  # hash of all tokens before each page
        self._slots = WeakValueDictionary[int, Generation]()
        self.round_s: dict[int, float] = {}  # of a round that computes few tokens a row, by the number of rows
        self.token_s = 0.0  # of a token that is caught up on; 0: not measured

    def num_missing(self, sequence: Generation) -> int:
        """Return the number of tokens that must be computed before the first guess: at least 1, the last one."""
        return sequence.num_tokens - self._num_known(sequence)

    def takes(self, sequence: Generation, most: int) -> bool:
        """Return whether the draft model can guess `most` tokens of a sequence: pictures are unknown to it."""
        fits = sequence.num_tokens + most <= self._context_len
        return fits and sequence.embedded is None

    def draft(self, asking: Sequence[Generation], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return at most `counts[i]` guesses of `asking[i]`, which holds pages for that many more tokens.

        A sequence that lacks more tokens than the budget allows gets no guesses yet.
        """
        guesses: list[list[int]] = [[] for _ in asking]
        turns = self._first_turns(asking)
        while turns:
            for turn, output in zip(turns, self._run(asking, turns), strict=True):
                self._note(asking[turn.of], turn.start, turn.token_ids)
                if turn.draws and output.token_ids and output.token_ids[0] < self._vocab_size:
                    guesses[turn.of].append(output.token_ids[0])
            turns = [
                Turn(turn.of, turn.start + len(turn.token_ids), guessed[-1:], draws=True)
                for turn in turns
                if (guessed := guesses[turn.of]) and self._continues(asking[turn.of], turn, guessed, counts)
            ]
        return [tuple(guessed) for guessed in guesses]

    def fade(self, share: float) -> None:
        """Reduce the measured times to this share, so that a model that once was too slow is tried again."""
        self.token_s *= share
        for num_rows in self.round_s:
            self.round_s[num_rows] *= share

    def clear(self) -> None:
        """Drop all that was computed, and return its memory to the system."""
        self._written.clear()
        self._runner.call("forget")

    def close(self) -> None:
        self._runner.close()

    @staticmethod
    def _continues(sequence: Generation, turn: Turn, guessed: list[int], counts: Sequence[int]) -> bool:
        is_new = turn.start + len(turn.token_ids) == sequence.num_tokens + len(guessed) - 1  # else no token was drawn
        is_end = guessed[-1] in sequence.terms.end_token_ids
        return is_new and not is_end and len(guessed) < counts[turn.of]

    def _first_turns(self, asking: Sequence[Generation]) -> list[Turn]:
        turns, budget = [], self._token_budget
        for index, sequence in enumerate(asking):
            start = self._num_known(sequence)
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
            known_s = self.round_s.get(len(turns), seconds)
            self.round_s[len(turns)] = known_s + RATE * (seconds - known_s)
            return
        each_s = seconds / sum(len(turn.token_ids) for turn in turns)
        self.token_s += (RATE if self.token_s else 1.0) * (each_s - self.token_s)

    def _num_known(self, sequence: Generation) -> int:
        """Return how many leading tokens, without the last one, the draft model's pages hold."""
        assert sequence.table is not None
        token_ids, count = sequence.token_ids, 0
        for prefix, page in zip(self._prefixes_of(sequence), sequence.table.pages, strict=False):
            written = self._written.get(page)
            if written is None or written.prefix != prefix:
                break
            here = token_ids[count : count + self._page_size]
            pairs = zip(written.token_ids, here, strict=False)
            num_equal = len(here) if written.token_ids == here else len(list(takewhile(_are_equal, pairs)))
            count += num_equal
            if num_equal < self._page_size:
                break
        return min(count, len(token_ids) - 1)

    def _prefixes_of(self, sequence: Generation) -> list[int]:
        prefixes, size = self._prefixes.setdefault(sequence, [0]), self._page_size
        for start in range((len(prefixes) - 1) * size, sequence.num_tokens - size + 1, size):
            prefixes.append(_next_prefix(Written(prefixes[-1], sequence.token_ids[start : start + size])))
        return prefixes

    def _note(self, sequence: Generation, start: int, token_ids: list[int]) -> None:
        """Record that tokens, of which the last may be guesses, were written to the pages of a sequence."""
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


def _are_equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def _next_prefix(page: Written) -> int:
    """Return the hash of all tokens before the page that follows a full one."""
    return hash((page.prefix, *page.token_ids))


def _slot_state(sequence: Generation) -> SlotState:
    """Return what decides a token in the draft model: the seed, and the parameters that do not follow the output."""
    params = without_history(sequence.request.params)
    return SlotState(sequence.slot, params, sequence.request.seed, prompt_ids=(), output_ids=(), end_token_ids=())
