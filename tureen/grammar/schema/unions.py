"""Unions of shapes of one type (arrays, objects)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tureen.grammar.expression import GrammarError

MAX_ALTERNATIVES = 256

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Unions(Generic[S]):
    """A union is a tuple of shapes, which may overlap; each method raises GrammarError for one that grows too large."""

    name: str
    whole: S  # all values of the type
    covers: Callable[[S, S], bool]  # the first certainly has all values of the second
    meet_shapes: Callable[[S, S], list[S]]
    shape_complement: Callable[[S], list[S]]

    def join(self, shapes: Iterable[S]) -> tuple[S, ...]:
        """Returns all the shapes, without those that another one covers."""
        kept: list[S] = []
        for shape in shapes:
            if not any(self.covers(other, shape) for other in kept):
                kept = [other for other in kept if not self.covers(shape, other)]
                kept.append(shape)
                if len(kept) > MAX_ALTERNATIVES:
                    raise self._too_large()
        return tuple(kept)

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
        shapes: list[S] = []
        for index, own in enumerate(unions):
            for other in unions[:index] + unions[index + 1 :]:
                if self.meet(own, other):
                    own = self.meet(own, self.complement(other))
            shapes += own
        return self.join(shapes)

    def _too_large(self) -> GrammarError:
        return GrammarError(
            "its combination of allOf, anyOf, oneOf, not, if, dependentSchemas, … is too large: more than"
            f" {MAX_ALTERNATIVES} alternatives for {self.name}"
        )
