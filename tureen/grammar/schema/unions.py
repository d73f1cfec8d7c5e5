"""Unions of shapes of one type (arrays, objects)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from tureen.grammar.expression import GrammarError

MAX_ALTERNATIVES = 256
MAX_JOINED = 4_000
"""The shapes that may have been looked at, to tell what is in exactly one of some unions, when the next two are
combined. Of the corpus of real schemas those that take more come to too many alternatives in the end; what can be told
takes 719 at most."""

S = TypeVar("S")


class Traits(NamedTuple):
    """Facts that a shape shares with every shape that it covers: most that do not cover each other are told apart by
    that."""

    few: frozenset[Hashable]  # with each of them
    many: frozenset[Hashable]  # with each of them that leaves others
    leaves_others: bool  # if not, `many` are `few`


NO_TRAITS = Traits(frozenset(), frozenset(), False)


@dataclass(frozen=True, slots=True)
class Unions(Generic[S]):
    """A union is a tuple of shapes, which may overlap; each method raises GrammarError for one that grows too large."""

    name: str
    whole: S  # all values of the type
    covers: Callable[[S, S], bool]  # the first certainly has all values of the second
    meet_shapes: Callable[[S, S], list[S]]
    shape_complement: Callable[[S], list[S]]
    traits: Callable[[S], Traits]
    joined: Counter[str] = field(default_factory=Counter)  # shapes that were looked at so far

    def join(self, shapes: Iterable[S]) -> tuple[S, ...]:
        """Returns all the shapes, without those that another one covers."""
        kept: list[tuple[S, Traits]] = []
        covers = self.covers
        for shape in shapes:
            self.joined[self.name] += 1
            traits = self.traits(shape)
            few, many, leaves_others = traits
            if leaves_others:
                is_covered = any(its.many <= many and covers(other, shape) for other, its in kept)
            else:
                is_covered = any(its.few <= few and covers(other, shape) for other, its in kept)
            if not is_covered:
                kept = [
                    (other, its)
                    for other, its in kept
                    if not ((many if its.leaves_others else few) <= its.many and covers(shape, other))
                ]
                kept.append((shape, traits))
                if len(kept) > MAX_ALTERNATIVES:
                    raise self._too_large()
        return tuple([shape for shape, _ in kept])

    def meet(self, first: tuple[S, ...], second: tuple[S, ...]) -> tuple[S, ...]:
        """Returns the shapes of what is in both."""
        if not first or not second:
            return ()
        if first[0] is self.whole or second[0] is self.whole:
            return second if first[0] is self.whole else first
        return self.join(shape for left in first for right in second for shape in self.meet_shapes(left, right))

    def complement(self, union: tuple[S, ...]) -> tuple[S, ...]:
        """Returns the shapes of what is in none of these."""
        outside: tuple[S, ...] = (self.whole,)
        for shape in union:
            outside = () if shape is self.whole else self.meet(outside, self.join(self.shape_complement(shape)))
        return outside

    def exactly_one(self, unions: list[tuple[S, ...]]) -> tuple[S, ...]:
        """Returns the shapes of what is in one of the unions and in no other."""
        outside = cache(lambda index: self.complement(unions[index]))
        are_apart = cache(lambda pair: not self.meets(*(unions[index] for index in pair)))
        shapes: list[S] = []
        start = self.joined[self.name]
        for index, own in enumerate(unions):
            for at, other in enumerate(unions):
                if at != index and not are_apart(frozenset((index, at))) and self.meets(own, other):
                    if self.joined[self.name] - start > MAX_JOINED:
                        raise self._too_large()
                    own = self.meet(own, outside(at))
            shapes += own
        return self.join(shapes)

    def meets(self, first: tuple[S, ...], second: tuple[S, ...]) -> bool:
        """Returns whether something may be in both."""
        return any(self.meet_shapes(left, right) for left in first for right in second)

    def _too_large(self) -> GrammarError:
        return GrammarError(
            "its combination of allOf, anyOf, oneOf, not, if, dependentSchemas, … is too large: more than"
            f" {MAX_ALTERNATIVES} alternatives for {self.name}"
        )
