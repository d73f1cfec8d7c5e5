"""Compiles languages for one vocabulary, and follows outputs in them token by token.

The native kernels, which the caller hands over, do both: docs/decisions/0138-one-engine-for-constraints.md says how.
docs/decisions/0053-answers-that-always-close.md says how outputs are brought to an end in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np

from tureen.grammar.base import Encode, Ending, Mask, Nearness, Vocabulary, Zones, packed
from tureen.grammar.expression import GrammarError, Language, TooComplex
from tureen.grammar.forced import MAX_BYTES, ForcedText
from tureen.grammar.tree import encoded

WORD_ZONE, SENTENCE_ZONE = 8, 32
"""The most spare tokens below which no further word, or no further sentence, begins. For a short output, these are
at most ..."""
WORD_SHARE, SENTENCE_SHARE = 8, 4  # ... an eighth and a quarter of its limit

MOST_KEPT = 3 << 20
"""The states and masks that all languages of a vocabulary may keep together, in configurations of about 40 bytes."""

AT_A_WORD = 2  # of what the native code says of a mask


class _Following:
    """Turns the native code's RuntimeError for a language that is too large into TooComplex."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is RuntimeError:
            raise TooComplex(str(error)) from None


following_a_language = _Following()


class LanguageCompiler:
    """Compiles languages for one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode, kernels: ModuleType) -> None:
        """`kernels`: the native module."""
        ends = set(vocabulary.eos_token_ids)
        texts = [b"" if index in ends else token for index, token in enumerate(vocabulary.tokens)]
        self.vocabulary = vocabulary
        self.native = kernels
        self._ends = packed(ends, vocabulary.size)
        self._trie = kernels.Trie.of(texts, sorted(ends), vocabulary.size, MOST_KEPT)
        self._forced = ForcedText(vocabulary, encode)

    @cached_property
    def guard_tokens(self) -> Any:
        """The vocabulary's tokens, indexed for guards."""
        return self.native.GuardTokens(self._trie)

    def translate(self, language: Language) -> bytes:
        """Compiles a language to a program, which any process can `load`. Raises GrammarError."""
        try:
            with following_a_language:
                program: bytes = self.native.closing_program(encoded(language, self.native), self._trie)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        return program

    def load(self, program: bytes) -> CompiledLanguage:
        """Loads a program. Raises GrammarError, and ValueError for a program of another version."""
        with following_a_language:
            follower = self.native.Follower(program, self._trie)
        least = follower.least if follower.least < self.native.NEVER else None
        place = partial(self.native.Place, follower)
        return CompiledLanguage(follower, place, self._forced, self._ends, least=least, num_bytes=2 * len(program))


class CompiledLanguage:
    """A compiled language without a guard. Immutable."""

    reserve = 0

    def __init__(
        self,
        follower: Any,
        place: Callable[[], Any],
        forced: ForcedText,
        ends: Mask,
        *,
        least: int | None,
        num_bytes: int,
    ) -> None:
        """`follower`: the native language. `place`: returns a new native place at the beginning."""
        self.follower = follower
        self.least = least
        self.ends = ends
        self.num_bytes = num_bytes
        self._place = place
        self._forced = forced

    def start(self) -> LanguagePlace:
        return self.at(self._place())

    def at(self, place: Any) -> LanguagePlace:
        """Wraps a native place."""
        return LanguagePlace(place, self._forced)


class LanguagePlace:
    """The place of one output in a language."""

    def __init__(self, place: Any, forced: ForcedText) -> None:
        self._place = place
        self._forced = forced
        self.rollback: Callable[[int], None] = place.rollback

    def fill_mask(self, mask: Mask) -> None:
        with following_a_language:
            self._place.fill(mask)

    def accept(self, token_id: int) -> bool:
        with following_a_language:
            is_allowed: bool = self._place.accept(token_id)
        return is_allowed

    def forced(self) -> list[int]:
        with following_a_language:
            text: bytes = self._place.forced(MAX_BYTES)
        return self._forced.tokens(text, self) if text else []

    @property
    def is_accepting(self) -> bool:
        with following_a_language:
            return bool(self._place.accepts)

    @property
    def is_done(self) -> bool:
        with following_a_language:
            return bool(self._place.is_over)

    @property
    def is_free(self) -> bool:
        with following_a_language:
            return bool(self._place.is_free)

    @property
    def cost(self) -> int:
        with following_a_language:
            cost: int = self._place.cost()
        return cost

    def restrict(self, mask: Mask, left: int, zones: Zones) -> Nearness:
        with following_a_language:
            nearness: int = self._place.restrict(mask, left, *zones)
        if nearness < AT_A_WORD:
            return Nearness(bool(nearness))
        ending = Ending(np.empty_like(mask), np.empty_like(mask))
        self._place.endings(ending.open, ending.nearer)
        return Nearness(True, ending)

    def num_closing(self, token_ids: Sequence[int], left: int) -> int:
        with following_a_language:
            count: int = self._place.num_closing(list(token_ids), left)
        return count


def zones_of(most: int) -> Zones:
    """Returns the zones of an output of at most `most` tokens."""
    return Zones(min(WORD_ZONE, most // WORD_SHARE), min(SENTENCE_ZONE, most // SENTENCE_SHARE))
