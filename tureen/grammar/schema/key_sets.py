"""Sets of strings, of property names above all: each, and their intersections and complements, worked out once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tureen.grammar.expression import NOTHING, GrammarError, Terminal
from tureen.grammar.schema.strings import StringSet

MAX_CLASSES = 32

T = TypeVar("T")


class KeySets:
    """Remembers of every set it made which others it is the intersection of."""

    def __init__(self) -> None:
        self.every = StringSet.anything()
        self._patterns: dict[str, StringSet] = {}
        self._lengths: dict[tuple[int, int | None], StringSet] = {}
        self._known: dict[int, tuple[StringSet, frozenset[int]]] = {id(self.every): (self.every, frozenset())}
        self._made: dict[frozenset[int], StringSet] = {frozenset(): self.every}
        self._outside: dict[int, StringSet] = {}
        self._without: dict[tuple[int, tuple[str, ...]], tuple[StringSet, StringSet]] = {}

    def pattern(self, pattern: str) -> StringSet:
        """Returns the strings that a pattern is found in. Raises GrammarError."""
        keys = self._patterns.get(pattern)
        if keys is None:
            keys = self._patterns[pattern] = StringSet.pattern(pattern)
        return keys

    def of_length(self, least: int, most: int | None) -> StringSet:
        """Returns the strings of `least` to `most` code points, None = without end."""
        strings = self._lengths.get((least, most))
        if strings is None:
            strings = self._lengths[least, most] = StringSet.of_length(least, most)
        return strings

    def both(self, first: StringSet, second: StringSet) -> StringSet:
        """Returns the intersection. Raises GrammarError."""
        parts = self._parts(first) | self._parts(second)
        common = self._made.get(parts)
        if common is None:
            is_contradiction = any(id(self._outside.get(part)) in parts for part in parts)
            common = StringSet.nothing() if is_contradiction else first.intersect(second)
            self._made[parts] = common
            self._known.setdefault(id(common), (common, parts))
        return common

    def outside(self, names: StringSet) -> StringSet:
        """Returns the complement."""
        others = self._outside.get(id(names))
        if others is None:
            self._parts(names)
            others = names.complement() if names.expression != NOTHING else self.every
            self._parts(others)
            self._outside[id(names)] = others
            self._outside[id(others)] = names
        return others

    def minus(self, names: StringSet, others: StringSet) -> StringSet:
        """Returns the strings that `others` does not have. Raises GrammarError."""
        return self.both(names, self.outside(others))

    def without(self, names: StringSet, keys: Iterable[str]) -> StringSet:
        """Returns the names that are none of these keys. Raises GrammarError."""
        held = tuple(keys) if names is self.every else names.among(keys)  # no other key takes anything away
        if not held:
            return names
        known = self._without.get((id(names), held))
        if known is None:
            known = self._without[id(names), held] = names, names.minus(StringSet.only(held))
        return known[1]

    def encoded_without(self, names: StringSet, keys: Iterable[str]) -> Terminal | None:
        """Returns the JSON texts of the names that are none of these keys; None where there are none. Raises
        GrammarError."""
        rest = self.without(names, keys)
        is_endless = names is self.every or names.is_endless  # then some are left
        return None if not is_endless and rest.is_empty() else rest.encoded()

    def split(self, classes: Iterable[tuple[StringSet, T]], names: StringSet) -> list[tuple[StringSet, T, bool]]:
        """Splits every class into what is in `names` and what is not; empty ones are left out. Raises GrammarError."""
        outside = self.outside(names)
        parts = []
        for have, value in classes:
            inner, outer = self.both(have, names), self.both(have, outside)
            parts += [(part, value, inside) for part, inside in ((inner, True), (outer, False)) if not part.is_empty()]
        self.check(len(parts))
        return parts

    def check(self, number: int) -> None:
        """Checks the number of classes that an object's keys fall in. Raises GrammarError."""
        if number > MAX_CLASSES:
            raise GrammarError(
                f'"patternProperties" is too large: {number} overlaps of patterns; at most {MAX_CLASSES}'
            )

    def _parts(self, names: StringSet) -> frozenset[int]:
        known = self._known.get(id(names))
        if known is None:
            parts = frozenset([id(names)])
            known = self._known[id(names)] = (names, parts)
            self._made[parts] = names
        return known[1]
