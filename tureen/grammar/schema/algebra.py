"""The algebra of sets of JSON values: intersection, union, complement and "exactly one", each done when looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from tureen.grammar.expression import GrammarError, SchemaError
from tureen.grammar.schema import arrays, objects
from tureen.grammar.schema.emptiness import CircularError, Emptiness, certainly_empty
from tureen.grammar.schema.key_sets import KeySets
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.shapes import (
    ARRAYS,
    NUMBERS,
    OBJECTS,
    PLAIN,
    STRINGS,
    ArrayShape,
    Kind,
    ObjectShape,
    PropertySet,
    ValueSet,
    ValueShape,
    in_order,
    is_subtracted,
)
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.unenforced import UnenforcedKeywords
from tureen.grammar.schema.unions import NO_TRAITS, Unions

T = TypeVar("T")
S = TypeVar("S", NumberSet, StringSet)

MAX_NODES = 50_000
TOO_LARGE = (
    f"its combination of allOf, anyOf, oneOf, not, if, … is too large: more than {MAX_NODES} schemas arise from it"
)
NOT_EXACT = (
    '"not", "oneOf" or "if" cannot be enforced over schemas of which a part is not enforced: all other values would'
    " have to be known"
)


class Algebra:
    """Makes nodes and looks into them. Not thread-safe."""

    def __init__(self, unenforced: UnenforcedKeywords) -> None:
        self.unenforced = unenforced
        self._known: dict[tuple[Kind, frozenset[ValueSet]], ValueSet] = {}
        self._pairs: dict[tuple[ValueSet, ValueSet], ValueSet] = {}
        self._emptiness = Emptiness(self)
        self.keys = KeySets()
        self.nothing = ValueSet("leaf", unenforced.origin)
        self.no_shape = self.nothing.shape = ValueShape()
        self.anything = ValueSet("leaf", unenforced.origin)
        self.nothing.opposite, self.anything.opposite = self.anything, self.nothing
        self.any_array = ArrayShape((), self.anything)
        self.any_object = ObjectShape({}, (PropertySet(self.keys.every, self.anything),))
        self.arrays: Unions[ArrayShape] = Unions(
            "arrays",
            self.any_array,
            partial(arrays.covers, self),
            partial(arrays.meet, self),
            lambda first, second: bool(arrays.meet(self, first, second)),
            partial(arrays.complement, self),
            lambda _: NO_TRAITS,
        )
        self.objects: Unions[ObjectShape] = Unions(
            "objects",
            self.any_object,
            partial(objects.covers, self),
            partial(objects.meet, self),
            partial(objects.may_meet, self),
            partial(objects.complement, self),
            partial(objects.traits, self),
        )
        self.any_shape = self.anything.shape = ValueShape(
            PLAIN, NumberSet.anything(), StringSet.anything(), (self.any_array,), (self.any_object,)
        )

    def leaf(self, read: Callable[[], ValueShape]) -> ValueSet:
        """Returns a set that `read` describes, later."""
        return ValueSet("leaf", self.unenforced.origin, (), read)

    def fixed(self, shape: ValueShape) -> ValueSet:
        """Returns the set of the values of a shape that is known."""
        node = ValueSet("leaf", self.unenforced.origin)
        node.shape = shape
        return node

    def all_of(self, nodes: Iterable[ValueSet]) -> ValueSet:
        """Returns the intersection of the sets; without any, all values."""
        return self._combined("all", nodes, self.anything, self.nothing)

    def both(self, first: ValueSet, second: ValueSet) -> ValueSet:
        """Returns the intersection of two sets, which is most of what is asked for."""
        if first is second or second is self.anything:
            return first
        if first is self.anything:
            return second
        known = self._pairs.get((first, second))
        if known is None:
            known = self._pairs[first, second] = self.all_of((first, second))
        return known

    def any_of(self, nodes: Iterable[ValueSet]) -> ValueSet:
        """Returns the union of the sets; without any, the empty set."""
        return self._combined("any", nodes, self.nothing, self.anything)

    def one_of(self, nodes: Iterable[ValueSet]) -> ValueSet:
        """Returns the values of exactly one of the nodes."""
        parts = tuple(node for node in nodes if node is not self.nothing)
        if not parts:
            return self.nothing
        return parts[0] if len(parts) == 1 else ValueSet("one", self.unenforced.origin, parts)

    def none_of(self, node: ValueSet) -> ValueSet:
        """Returns the complement."""
        if node.opposite is None:
            if node.kind == "all":
                opposite = self.any_of(map(self.none_of, node.parts))
            else:
                opposite = ValueSet("not", self.unenforced.origin, (node,))
            node.opposite, opposite.opposite = opposite, node
        self.unenforced.also_from(node.opposite.origin)
        return node.opposite

    def _combined(self, kind: Kind, nodes: Iterable[ValueSet], neutral: ValueSet, absorbing: ValueSet) -> ValueSet:
        parts: dict[ValueSet, None] = {}
        for node in nodes:
            for part in node.parts if node.kind == kind else (node,):
                if part is absorbing or part.opposite in parts:
                    return absorbing
                if part is not neutral:
                    parts[part] = None
        if len(parts) < 2:
            return next(iter(parts), neutral)
        key = (kind, frozenset(parts))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_NODES:
                raise GrammarError(TOO_LARGE)
            known = self._known[key] = ValueSet(kind, self.unenforced.origin, tuple(parts))
        self.unenforced.also_from(known.origin)
        return known

    def covers(self, node: ValueSet, other: ValueSet) -> bool:
        """Returns whether `node` certainly has all values of `other`."""
        if node is other or node is self.anything or other is self.nothing:
            return True
        parts = other.parts if other.kind == "all" else (other,)
        return (node.kind == "all" and set(node.parts) <= set(parts)) or node in parts

    def shape(self, node: ValueSet) -> ValueShape:
        """Returns one level of a set. Raises GrammarError."""
        if node.shape is None:
            if node.busy:
                raise CircularError(
                    'a schema that is defined by itself ("$ref" in a circle, without a property or an item'
                    " between) says nothing about values"
                )
            node.busy = True
            try:
                with self.unenforced.at(node.origin):
                    node.shape = self._look(node)
            finally:
                node.busy = False
        return node.shape

    def _look(self, node: ValueSet) -> ValueShape:
        if node.read is not None:
            return node.read()
        if node.kind == "all":
            shape = self.any_shape
            for part in in_order(node.parts):
                shape = self.narrowed(shape, part)
            return shape
        shapes = [self.shape(part) for part in node.parts]
        if node.kind == "any":
            return self.join(shapes)
        return self.complement(shapes[0]) if node.kind == "not" else self.exactly_one(shapes)

    def narrowed(self, shape: ValueShape, node: ValueSet) -> ValueShape:
        """Returns the values of a shape that are in a set: of a complement, what is left is looked for at once."""
        if is_subtracted(node) and not shape.partial:
            with self.unenforced.at(node.origin):
                return self.minus(shape, self.shape(node.parts[0]))
        return self.meet(shape, self.shape(node))

    def is_nothing(self, node: ValueSet) -> bool:
        """Returns True only where it is certain, which is tried by looking a few levels deep."""
        return node is self.nothing if node is self.nothing or node is self.anything else self._emptiness.of(node)

    def meet(self, first: ValueShape, second: ValueShape) -> ValueShape:
        """Returns the values that are in both. Of a type where that cannot be told, those of `first`."""
        if first is self.any_shape or second is self.any_shape:
            return second if first is self.any_shape else first
        kept = Kept(self.unenforced)
        shape = ValueShape(
            first.plain & second.plain,
            kept.of(NUMBERS, lambda: first.numbers.intersect(second.numbers), lambda: first.numbers),
            kept.of(STRINGS, lambda: self.keys.both(first.strings, second.strings), lambda: first.strings),
            kept.of(ARRAYS, lambda: self.arrays.meet(first.arrays, second.arrays), lambda: first.arrays),
            kept.of(OBJECTS, lambda: self.objects.meet(first.objects, second.objects), lambda: first.objects),
        )
        partial, loose = first.partial | second.partial, kept.loose | first.loose | second.loose
        if not (partial or loose):
            return shape
        return replace(shape, partial=partial & _kinds(first) & _kinds(second), loose=loose & _kinds(shape))

    def join(self, shapes: list[ValueShape]) -> ValueShape:
        """Returns the values that are in any of them. Of a type where they are too many, all there are."""
        kept = Kept(self.unenforced)
        every = self.any_shape
        return ValueShape(
            _flags(shape.plain for shape in shapes),
            kept.of(NUMBERS, lambda: _any_of([shape.numbers for shape in shapes]), lambda: every.numbers),
            kept.of(STRINGS, lambda: _any_of([shape.strings for shape in shapes]), lambda: every.strings),
            arrays=kept.of(
                ARRAYS,
                lambda: self.arrays.join(item for shape in shapes for item in shape.arrays),
                lambda: (self.any_array,),
            ),
            objects=kept.of(
                OBJECTS,
                lambda: self.objects.join(item for shape in shapes for item in shape.objects),
                lambda: (self.any_object,),
            ),
            partial=_flags(shape.partial for shape in shapes),
            loose=kept.loose | _flags(shape.loose for shape in shapes),
        )

    def complement(self, shape: ValueShape) -> ValueShape:
        """Returns the values that are not in it. Of a type that is not exactly known, more than these."""
        self._note_half_known(shape)
        kept, every = Kept(self.unenforced, shape.loose), self.any_shape
        return ValueShape(
            shape.plain ^ PLAIN,
            kept.of(NUMBERS, shape.numbers.complement, lambda: every.numbers),
            kept.of(STRINGS, shape.strings.complement, lambda: every.strings),
            kept.of(ARRAYS, lambda: self.arrays.complement(shape.arrays), lambda: every.arrays),
            kept.of(OBJECTS, lambda: self.objects.complement(shape.objects), lambda: every.objects),
            loose=kept.loose | shape.partial,
        )

    def minus(self, first: ValueShape, second: ValueShape) -> ValueShape:
        """Returns the values of a shape without `partial` that are not in another one: what `meet` with the
        `complement` does."""
        self._note_half_known(second)
        kept = Kept(self.unenforced, second.loose)
        shape = ValueShape(
            first.plain & ~second.plain,
            kept.of(NUMBERS, lambda: first.numbers.minus(second.numbers), lambda: first.numbers),
            kept.of(STRINGS, lambda: self.keys.minus(first.strings, second.strings), lambda: first.strings),
            kept.of(ARRAYS, lambda: self.arrays.minus(first.arrays, second.arrays), lambda: first.arrays),
            kept.of(OBJECTS, lambda: self.objects.minus(first.objects, second.objects), lambda: first.objects),
        )
        loose = first.loose | second.partial | kept.loose
        return replace(shape, loose=loose & _kinds(shape)) if loose else shape

    def exactly_one(self, shapes: list[ValueShape]) -> ValueShape:
        """Returns the values of exactly one of them. Of a type where that cannot be told, those of any."""
        vague = _vague(shapes)
        partial_, loose = _flags(shape.partial for shape in shapes), _flags(shape.loose for shape in shapes)
        if vague:
            self.unenforced.note(_half_known(vague & partial_) if vague & partial_ else NOT_EXACT)
        kept = Kept(self.unenforced, vague)
        any_of = cache(lambda: self.join(shapes))
        return ValueShape(
            _once_plain(shapes),
            kept.of(NUMBERS, lambda: _once([shape.numbers for shape in shapes]), lambda: any_of().numbers),
            kept.of(STRINGS, lambda: _once([shape.strings for shape in shapes]), lambda: any_of().strings),
            kept.of(
                ARRAYS, lambda: self.arrays.exactly_one([shape.arrays for shape in shapes]), lambda: any_of().arrays
            ),
            kept.of(
                OBJECTS, lambda: self.objects.exactly_one([shape.objects for shape in shapes]), lambda: any_of().objects
            ),
            partial_,
            loose | kept.loose,
        )

    def _note_half_known(self, shape: ValueShape) -> None:
        if shape.partial or shape.loose:
            self.unenforced.note(_half_known(shape.partial) if shape.partial else NOT_EXACT)


class Kept:
    """Makes the parts of a shape, and tells of which types more is allowed than the schema does."""

    def __init__(self, unenforced: UnenforcedKeywords, loose: int = 0) -> None:
        """`loose`: of these types nothing is tried."""
        self.loose = loose
        self._unenforced = unenforced

    def of(self, kind: int, make: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Returns what `make` makes; what `otherwise` does where it cannot be made. Raises SchemaError."""
        try:
            return otherwise() if self.loose & kind else make()
        except SchemaError:
            raise
        except GrammarError as error:
            self._unenforced.note(str(error))
            self.loose |= kind
            return otherwise()


def _kinds(shape: ValueShape) -> int:
    """Returns the types of which something may be in the shape, or would be were all of it known."""
    return (
        (0 if certainly_empty(shape.strings) else STRINGS)
        | (OBJECTS if shape.objects else 0)
        | (0 if shape.numbers.is_empty() else NUMBERS)
        | (ARRAYS if shape.arrays else 0)
        | shape.partial
    )


def _vague(shapes: list[ValueShape]) -> int:
    """Returns the types of which it is not exactly known what several of the shapes have."""
    flags = _flags(shape.partial | shape.loose for shape in shapes)
    if not flags:
        return 0
    kinds = list(map(_kinds, shapes))
    several = [kind for kind in (STRINGS, OBJECTS, NUMBERS, ARRAYS) if sum(bool(has & kind) for has in kinds) > 1]
    return flags & _flags(several)


def _flags(sets: Iterable[int]) -> int:
    flags = 0
    for bits in sets:
        flags |= bits
    return flags


def _once_plain(shapes: list[ValueShape]) -> int:
    once = seen = 0
    for shape in shapes:
        once, seen = (once & ~shape.plain) | (shape.plain & ~seen), seen | shape.plain
    return once


def _any_of(sets: list[S]) -> S:
    """Returns what is in any of the sets of numbers, or of strings."""
    return _folded(sets, lambda first, second: first.union(second))


def _once(sets: list[S]) -> S:
    """Returns what is in one of the sets of numbers, or of strings, only."""

    def both(first: tuple[S, S], second: tuple[S, S]) -> tuple[S, S]:
        (once, seen), (once_too, seen_too) = first, second
        return once.minus(seen_too).union(once_too.minus(seen)), seen.union(seen_too)

    return _folded([(values, values) for values in sets], both)[0]


def _folded(items: list[T], both: Callable[[T, T], T]) -> T:
    """Combines neighbours, then neighbours of these, and so on: each item is gone through O(log n) times."""
    while len(items) > 1:
        last = items[-1:] if len(items) % 2 else []
        items = [both(items[at], items[at + 1]) for at in range(0, len(items) - 1, 2)] + last
    return items[0]


def _half_known(partial: int) -> str:
    name = '"format"' if partial & STRINGS else '"discriminator"'
    return (
        f'{name} cannot be enforced under "not", "oneOf" or "if", where all other values have to be known:'
        f" leave it out there"
    )
