"""Unions of shapes of one type (arrays, objects)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from tureen.grammar.expression import GrammarError

MAX_ALTERNATIVES = 256
MAX_JOINED = 4_000
"""The shapes that may have been looked at, to tell what is in exactly one of some unions, when the next two are
combined. Of the corpus of real schemas those that take more come to too many alternatives in the end; what can be told
takes 719 at most."""

MAX_BITS = 1024
"""The facts that have a bit of their own; others share one, so that fewer shapes are told apart by them."""

S = TypeVar("S")


class Traits(NamedTuple):
    """Facts that a shape shares with every shape that it covers: most that do not cover each other are told apart by
    that."""

    few: Collection[Hashable]  # with each of them
    more: Collection[Hashable]  # besides, with each of them that leaves others
    leaves_others: bool  # if not, there are no more


class TraitBits(NamedTuple):
    """The traits of a shape, one bit for each fact: whether some may be among others takes no look at each."""

    few: int
    many: int  # with those of `few`
    leaves_others: bool


NO_TRAITS = Traits((), (), False)


@dataclass(frozen=True, slots=True)
class Unions(Generic[S]):
    """A union is a tuple of shapes, which may overlap; each method raises GrammarError for one that grows too large."""

    name: str
    whole: S  # all values of the type
    covers: Callable[[S, S], bool]  # the first certainly has all values of the second
    meet_shapes: Callable[[S, S], list[S]]
    shapes_may_meet: Callable[[S, S], bool]  # whether `meet_shapes` returns any
    shape_complement: Callable[[S], list[S]]
    traits: Callable[[S], Traits]
    joined: Counter[str] = field(default_factory=Counter)  # shapes that were looked at so far
    outsides: dict[int, tuple[S, tuple[S, ...]]] = field(default_factory=dict)  # by id: a shape, and its complement
    known_traits: dict[int, tuple[S, TraitBits]] = field(default_factory=dict)  # by id
    bits: dict[Hashable, int] = field(default_factory=dict)  # by fact
    met: dict[tuple[int, int], tuple[tuple[S, ...], ...]] = field(default_factory=dict)  # by ids: two unions, in both
    left: dict[tuple[tuple[int, ...], ...], tuple[tuple[S, ...], ...]] = field(default_factory=dict)  # by shapes' ids

    def join(self, shapes: Iterable[S]) -> tuple[S, ...]:
        """Returns all the shapes, without those that another one covers."""
        kept: list[tuple[S, TraitBits]] = []
        covers = self.covers
        for shape in shapes:
            self.joined[self.name] += 1
            traits = self._traits(shape)
            few, many, leaves_others = traits
            no_few, no_many = ~few, ~many
            for other, (its_few, its_many, _) in kept:
                if not (its_many & no_many if leaves_others else its_few & no_few) and covers(other, shape):
                    break
            else:
                covered = [
                    other
                    for other, (_, its_many, its_leaves) in kept
                    if not (many if its_leaves else few) & ~its_many and covers(shape, other)
                ]
                if covered:
                    kept = [entry for entry in kept if not any(entry[0] is other for other in covered)]
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
        known = self.met.get((id(first), id(second)))
        if known is None:
            both = self.join(shape for left in first for right in second for shape in self.meet_shapes(left, right))
            known = self.met[id(first), id(second)] = first, second, both
        return known[2]

    def complement(self, union: tuple[S, ...]) -> tuple[S, ...]:
        """Returns the shapes of what is in none of these."""
        return self.minus((self.whole,), union)

    def minus(self, first: tuple[S, ...], second: tuple[S, ...]) -> tuple[S, ...]:
        """Returns the shapes of what is in the first union and not in the second.

        A shape of the second is taken from those of the first that it has something in common with, and these stay as
        they are if it has not: the complement of all of the second may be many times larger than what is left.
        """
        key = tuple(map(id, first)), tuple(map(id, second))
        known = self.left.get(key)
        if known is None:
            known = self.left[key] = first, second, self._minus(first, second)
        return known[2]

    def _minus(self, first: tuple[S, ...], second: tuple[S, ...]) -> tuple[S, ...]:
        for shape in second:
            if not first or shape is self.whole:
                return ()
            if first[0] is self.whole:
                first = self._outside(shape)
                continue
            common = [self.shapes_may_meet(own, shape) for own in first]
            if any(common):
                left = (
                    self.meet((own,), self._outside(shape)) if is_common else (own,)
                    for own, is_common in zip(first, common, strict=True)
                )
                first = self.join(own for shapes in left for own in shapes)
        return first

    def _traits(self, shape: S) -> TraitBits:
        known = self.known_traits.get(id(shape))
        if known is None:
            few, more, leaves_others = self.traits(shape)
            least = self._bits(few)
            bits = TraitBits(least, least | self._bits(more), leaves_others)
            known = self.known_traits[id(shape)] = shape, bits
        return known[1]

    def _bits(self, facts: Collection[Hashable]) -> int:
        bits, bit_of = 0, self.bits
        for fact in facts:
            bit = bit_of.get(fact)
            if bit is None:
                bit = bit_of[fact] = 1 << len(bit_of) % MAX_BITS
            bits |= bit
        return bits

    def _outside(self, shape: S) -> tuple[S, ...]:
        known = self.outsides.get(id(shape))
        if known is None:
            known = self.outsides[id(shape)] = shape, self.join(self.shape_complement(shape))
        return known[1]

    def exactly_one(self, unions: list[tuple[S, ...]]) -> tuple[S, ...]:
        """Returns the shapes of what is in one of the unions and in no other."""
        unions = list(filter(None, unions))
        if len(unions) > MAX_ALTERNATIVES:  # some of each are in the end, but where one says the same as another
            raise self._too_large()
        are_apart = cache(lambda pair: not self.meets(*(unions[index] for index in pair)))
        shapes: list[S] = []
        start = self.joined[self.name]
        for index, own in enumerate(unions):
            for at, other in enumerate(unions):
                if at != index and not are_apart(frozenset((index, at))):
                    if self.joined[self.name] - start > MAX_JOINED:
                        raise self._too_large()
                    own = self.minus(own, other)
            shapes += own
        return self.join(shapes)

    def meets(self, first: tuple[S, ...], second: tuple[S, ...]) -> bool:
        """Returns whether something may be in both."""
        return any(self.shapes_may_meet(left, right) for left in first for right in second)

    def _too_large(self) -> GrammarError:
        return GrammarError(
            "its combination of allOf, anyOf, oneOf, not, if, dependentSchemas, … is too large: more than"
            f" {MAX_ALTERNATIVES} alternatives for {self.name}"
        )
