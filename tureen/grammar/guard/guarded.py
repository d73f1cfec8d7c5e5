"""Grammars with a guard: of the tokens that the grammar allows, those that would break a fact are left out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from tureen.grammar.base import CompiledGrammar, Grammar, Mask, Vocabulary, packed
from tureen.grammar.expression import GrammarError, Language
from tureen.grammar.follower import LanguageCompiler
from tureen.grammar.guard.branches import BranchFollower
from tureen.grammar.guard.facts import THE_END, FixedStep, FreeStep, GuardFacts, KeyStep, ValueStep
from tureen.grammar.guard.reader import Broken, Mode, Place, PossiblePlaces
from tureen.grammar.guard.steps import StepPlace, StepReader

MAX_LOOKS = 256
"""The most places that one mask is looked ahead from; beyond, a way out is taken for granted."""

RESERVE, RESERVE_OF_KEY, RESERVE_OF_BRANCH = 8, 12, 24
MAX_MISSING = 3
"""The most bytes that a character may still need."""

IN_TEXTS = (*range(0x20, 0xC0), *range(0xC2, 0xF5))
"""The bytes of UTF-8 without control characters, which JSON writes in other ways."""

IN_STRINGS = (Mode.STRING, Mode.ESCAPE, Mode.KEY, Mode.KEY_ESCAPE)


def load_guarded(program: bytes, facts: GuardFacts | None, compiler: LanguageCompiler) -> CompiledGrammar:
    """Loads a program, with a guard where there are facts to guard. Raises GrammarError."""
    compiled = compiler.load(program)
    if facts is None:
        return compiled
    return GuardedCompiled(compiled, facts, _tokens(compiler.vocabulary), tuple(map(compiler.load, facts.branches)))


def ready(language: Language, compiler: LanguageCompiler, *, strict: bool) -> Language:
    """Returns a language whose guard has all that is loaded for it; without a guard, and told so, where it cannot be
    had. Raises GrammarError there if strict."""
    if language.guard is None or not language.branches:
        return language
    try:
        if not _tokens(compiler.vocabulary).has_bytes:
            raise GrammarError("the vocabulary has no token for each byte")
        branches = tuple(map(compiler.translate, language.branches))
    except GrammarError:
        if strict:
            raise GrammarError(language.guarded[0].why) from None
        return replace(language, guard=None, guarded=(), unenforced=(*language.unenforced, *language.guarded))
    return replace(language, guard=msgspec.structs.replace(language.guard, branches=branches))


class GuardedTokens:
    """The tokens of a vocabulary as guards look for them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.texts = vocabulary.tokens
        self.num_words = -(-vocabulary.size // 32)
        self.ends = self._bits(vocabulary.eos_token_ids)
        self.quoting = self._bits(index for index, text in enumerate(vocabulary.tokens) if b'"' in text)
        self.opening = self._bits(index for index, text in enumerate(vocabulary.tokens) if b"[" in text or b"{" in text)
        self.ids: dict[bytes, list[int]] = {}
        for index, text in enumerate(vocabulary.tokens):
            if text:
                self.ids.setdefault(text, []).append(index)
        self.byte_ids = [self.ids.get(bytes([byte]), [-1])[0] for byte in range(256)]
        self.has_bytes = all(self.byte_ids[byte] >= 0 for byte in IN_TEXTS)
        self.unfinished = self._bits(index for index, text in enumerate(vocabulary.tokens) if missing_bytes(text))
        self.longest = max(map(len, vocabulary.tokens), default=0)
        self._sorted = sorted(self.ids)
        self._across: dict[bytes, list[int]] = {}

    def _bits(self, ids: Iterable[int]) -> NDArray[np.uint32]:
        bits = np.zeros(self.num_words, dtype=np.uint32)
        for index in ids:
            bits[index // 32] |= np.uint32(1 << (index % 32))
        return bits

    def beginning(self, text: bytes) -> list[int]:
        """Returns the tokens that a text begins with."""
        sizes = range(1, min(self.longest, len(text)) + 1)
        return [index for size in sizes for index in self.ids.get(text[:size], ())]

    def beyond(self, text: bytes) -> list[int]:
        """Returns the tokens that begin with a text and have more."""
        start = bisect_right(self._sorted, text)
        end = bisect_left(self._sorted, text + b"\xff", start)
        return [index for token in self._sorted[start:end] for index in self.ids[token]]

    def across(self, text: bytes, before: bytes) -> list[int]:
        """Returns the tokens that end a text, whose beginning may stand at the end of what is before, and have more."""
        if text not in self._across:
            holding = (token for token in self._sorted if text in token[:-1])
            self._across[text] = [index for token in holding for index in self.ids[token]]
        begun = [size for size in range(1, len(text)) if before.endswith(text[:size])]
        return [*self._across[text], *(index for size in begun for index in self.beyond(text[size:]))]


@lru_cache(2)
def _tokens(vocabulary: Vocabulary) -> GuardedTokens:
    return GuardedTokens(vocabulary)


class GuardedCompiled:
    """A compiled grammar, all of whose outputs are guarded."""

    def __init__(
        self, inner: CompiledGrammar, facts: GuardFacts, tokens: GuardedTokens, branches: tuple[CompiledGrammar, ...]
    ) -> None:
        self.ends = inner.ends
        self.least = inner.least
        self._inner = inner
        self._facts = facts
        self._tokens = tokens
        self._branches = branches

    @property
    def num_bytes(self) -> int:
        branches = sum(branch.num_bytes for branch in self._branches)
        return self._inner.num_bytes + branches + 500 * len(self._facts.nodes)

    @property
    def reserve(self) -> int:
        """Returns how many tokens an end may take because of the guard: an item must differ, keys must come, a value
        must become another than the shortest."""
        counted = sum(node.least_keys + (node.count.least if node.count else 0) for node in self._facts.nodes)
        return RESERVE + RESERVE_OF_KEY * counted + (RESERVE_OF_BRANCH if self._branches else 0)

    def start(self) -> GuardedGrammar:
        branches = BranchFollower(self._branches, self._tokens.byte_ids)
        return GuardedGrammar(self._inner.start(), StepReader(self._facts, branches.fits), self._tokens, branches)


class GuardedGrammar:
    """A grammar somewhere in an output, and the reader of what was written."""

    def __init__(self, inner: Grammar, reader: StepReader, tokens: GuardedTokens, branches: BranchFollower) -> None:
        self._inner = inner
        self._branches = branches
        self._reader = reader
        self._tokens = tokens
        self._data = bytearray()
        self._places = [reader.start]
        self._sizes = [0]  # of the text at each place
        self._looks_left = 0
        self.restrict, self.num_closing = inner.restrict, inner.num_closing

    def fill_mask(self, mask: Mask) -> None:
        self._looks_left = MAX_LOOKS
        for token_id in self._fill(mask):
            if not self._has_way_out(token_id):
                _clear(mask, token_id)

    def accept(self, token_id: int) -> bool:
        if not self._inner.accept(token_id):  # asked first: the grammar bounds the numbers that the guard computes with
            return False
        place = self._behind(self._text(token_id))
        if place is None:
            self._inner.rollback(1)
            return False
        self._data += self._text(token_id)
        if place.value is not None and len(place.value.each) > 1:
            place = place._replace(value=self._reader.json.fitting(place.value, self._data) or place.value)
        self._places.append(place)
        self._sizes.append(len(self._data))
        return True

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._places[-num_tokens:], self._sizes[-num_tokens:]
            del self._data[self._sizes[-1] :]

    def forced(self) -> list[int]:
        forced, text = [], b""
        for token_id in self._inner.forced():
            text += self._text(token_id)
            if self._behind(text) is None:
                break
            forced.append(token_id)
        return forced

    def nearer(self) -> list[int]:
        """Returns tokens that lead nearer to the end than closing can know: those of a number that is no multiple
        yet."""
        value = self._places[-1].value
        rest = b"" if value is None else self._reader.json.rest_of_number(value, self._data)
        return self._tokens.beginning(rest)[::-1]

    @property
    def is_accepting(self) -> bool:
        return self._inner.is_accepting and self._reader.ends(self._places[-1], self._data)

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    @property
    def is_free(self) -> bool:
        return self._inner.is_free

    @property
    def cost(self) -> int:
        return self._inner.cost

    def _text(self, token_id: int) -> bytes:
        return self._tokens.texts[token_id] if token_id < len(self._tokens.texts) else b""

    def _behind(self, text: bytes) -> StepPlace | None:
        """Returns the place behind a text that may come next; None where it breaks a fact."""
        place, start = self._places[-1], len(self._data)
        self._data += text
        try:
            for at in range(start, len(self._data)):
                before, place = place, self._reader.read(place, self._data, at)
                if place.start != before.start and not self._was_in_budget(before, at + 1):
                    return None
            if place.value is not None and place.value.is_narrow:
                fitting = self._reader.json.fitting(place.value, self._data)
                return None if fitting is None else place._replace(value=fitting)
            if not self._is_in_budget(place):
                return None
        except Broken:
            return None
        finally:
            del self._data[start:]
        return place

    def _is_in_budget(self, place: StepPlace) -> bool:
        """Returns whether the free text that a place is in has no more tokens than it may have, the last one being one
        whose text is at the end of what there is and that is not counted among the places yet."""
        step = self._reader.step(place)
        if not isinstance(step, FreeStep) or step.most_tokens is None or len(self._data) == place.start:
            return True
        left = step.most_tokens - _num_after(self._sizes, place.start) - 1
        return missing_bytes(self._data) <= left if left >= 0 else bool(self._rests(step, place))

    def _was_in_budget(self, place: StepPlace, end: int) -> bool:
        """Returns whether the free text that a place was in, which one of its ends ends, has no more tokens than it
        may have."""
        step = self._reader.step(place)
        if not isinstance(step, FreeStep) or step.most_tokens is None:
            return True
        stop = next(stop for stop, _ in step.stops if self._data.endswith(stop, place.start, end))
        free_end = end - len(stop)
        num_tokens = bisect_left(self._sizes, free_end) - bisect_right(self._sizes, place.start) + 1
        return free_end == place.start or num_tokens <= step.most_tokens

    def _rests(self, step: FreeStep, place: StepPlace) -> list[bytes]:
        """Returns what there must still be of a text that ends a free text, all of whose tokens are there."""
        first = bisect_right(self._sizes, place.start)
        budget = step.most_tokens or 0
        last = self._sizes[first + budget - 1] if budget else place.start  # where the free text ends at the latest
        data, rests = bytes(self._data[place.start :]), []
        for stop, _ in step.stops:
            for start in range(max(0, len(data) - len(stop)), min(last - place.start, len(data)) + 1):
                if stop.startswith(data[start:]) and data[:start] not in step.never:
                    rests.append(stop[len(data) - start :])
        return rests

    def _within_budget(self, mask: Mask, place: StepPlace) -> None:
        """Leaves the tokens that end a free text where it has all tokens that it may have."""
        step = self._reader.step(place)
        if not isinstance(step, FreeStep) or step.most_tokens is None:
            return
        left = step.most_tokens - _num_after(self._sizes, place.start)
        if left > MAX_MISSING:
            return
        if left > 0:  # no character may need more tokens than there are
            for token_id in _ids(mask) if missing_bytes(self._data) else _ids(mask & self._tokens.unfinished):
                if missing_bytes(self._data[-MAX_MISSING:] + self._text(token_id)) >= left:
                    _clear(mask, token_id)
        elif not step.stops:
            mask &= self._tokens.ends
        else:
            rests = self._rests(step, place)
            tokens = {token for rest in rests for token in (*self._tokens.beginning(rest), *self._tokens.beyond(rest))}
            mask &= packed(sorted(tokens), 32 * len(mask))

    def _fill(self, mask: Mask) -> list[int]:
        """Writes the tokens that break nothing; returns those after which an item may still become one that was."""
        self._inner.fill_mask(mask)
        if not self._reader.ends(place := self._places[-1], self._data):
            mask &= ~self._tokens.ends
        if place.value is not None and place.value.is_narrow:
            mask &= self._narrow(place.value)
        self._within_budget(mask, place)
        near: set[int] = set()
        for token_id in self._looked_at(place, mask):
            behind = self._behind(self._text(token_id))
            if behind is None:
                _clear(mask, token_id)
            elif self._is_near(behind, token_id):
                near.add(token_id)
        if place.value is not None and place.value.each[0].mode in IN_STRINGS:
            near.update(token_id for token_id in self._going_on(place.value) if _is_set(mask, token_id))
        return sorted(near)

    def _narrow(self, places: PossiblePlaces) -> Mask:
        """Returns the tokens that at least one of the places has."""
        every, branch = (np.zeros(self._tokens.num_words, dtype=np.uint32) for _ in range(2))
        for place in places.each:
            own = np.full_like(every, 0xFFFFFFFF)
            for hold in place.holds:
                self._branches.fill_mask(hold, self._data, branch)
                own &= branch
            every |= own
        return every

    def _looked_at(self, place: StepPlace, mask: Mask) -> list[int]:
        """Returns the tokens of a mask that can break something: those that end what is being written."""
        match self._reader.step(place), place.value and place.value.each[0]:
            case ValueStep(free=int()), Place(Mode.VALUE, None):
                return _ids(mask & self._tokens.opening)
            case ValueStep(), Place(mode):
                return _ids(mask & self._tokens.quoting if mode in IN_STRINGS else mask & ~self._tokens.ends)
            case FixedStep(otherwise=int(step)), _ if step != THE_END and len(self._data) == place.start:
                return _ids(mask & ~self._tokens.ends)
            case FixedStep(texts), _:
                text = bytes(self._data[place.start :])
                rests = [fixed[len(text) :] for fixed, _ in texts if fixed.startswith(text)]
                tokens = {token_id for rest in rests for token_id in self._tokens.beyond(rest)}
            case FreeStep(stops, _, never), _:
                tokens = self._across([stop for stop, _ in stops], place)
                tokens.update(token_id for text in never for token_id in self._tokens.ids.get(text, ()))
            case KeyStep(stops), _:
                tokens = self._across(stops, place)
            case _:
                return []
        return [token_id for token_id in sorted(tokens) if _is_set(mask, token_id)]

    def _across(self, stops: Sequence[bytes], place: StepPlace) -> set[int]:
        before = bytes(self._data[max(place.start, len(self._data) - max(map(len, stops), default=0)) :])
        return {token_id for stop in stops for token_id in self._tokens.across(stop, before)}

    def _is_near(self, behind: StepPlace, token_id: int) -> bool:
        """Returns whether a token leads to what may not be, if it ended there: an item that was, a free text that is
        excluded."""
        if behind.value is not None:
            return self._is_near_an_item(behind.value, token_id)
        step = self._reader.step(behind)
        if not isinstance(step, FreeStep) or not step.never:
            return False
        free = bytes(self._data + self._text(token_id))[behind.start :]
        return bool(free) and free in step.never

    def _is_near_an_item(self, behind: PossiblePlaces, token_id: int) -> bool:
        json, start = self._reader.json, len(self._data)
        self._data += self._text(token_id)
        try:
            near = [json.is_near(place, self._data) for place in behind.each]
            if any(near) and not all(near):
                fitting = json.fitting(behind, self._data) or behind
                near = [json.is_near(place, self._data) for place in fitting.each]
            return all(near)
        finally:
            del self._data[start:]

    def _going_on(self, places: PossiblePlaces) -> set[int]:
        """Returns the tokens that go on as an item went on that is there."""
        rest = {
            other[len(text) :]
            for place in places.each
            for text, others in self._reader.json.written(place, self._data)
            for other in others
            if other.startswith(text)
        }
        return {token_id for text in rest for token_id in self._tokens.beginning(text)}

    def _has_way_out(self, token_id: int) -> bool:
        """Returns whether something can follow a token that breaks nothing then and later."""
        if self._looks_left <= 0:
            return True
        self._looks_left -= 1
        if not self.accept(token_id):
            return False
        try:
            mask = np.zeros(self._tokens.num_words, dtype=np.uint32)
            near = self._fill(mask)
            is_free = int(np.unpackbits(mask.view(np.uint8)).sum()) > len(near)
            return is_free or any(self._has_way_out(other) for other in near)
        finally:
            self.rollback(1)


def _num_after(sizes: Sequence[int], start: int) -> int:
    """Returns how many tokens hold some of the text after a position. `sizes`: of the text after each token."""
    return len(sizes) - bisect_right(sizes, start)


def missing_bytes(text: bytes | bytearray) -> int:
    """Returns how many bytes the last character of a text in UTF-8 still needs."""
    for size in range(1, min(MAX_MISSING, len(text)) + 1):
        byte = text[-size]
        if byte >= 0xC0:
            return max((2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) - size, 0)
        if byte < 0x80:
            break
    return 0


def _ids(mask: Mask) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def _clear(mask: Mask, token_id: int) -> None:
    mask[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)


def _is_set(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> np.uint32(token_id % 32) & 1)
