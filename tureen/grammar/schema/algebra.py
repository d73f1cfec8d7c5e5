"""The algebra of sets of JSON values: intersection, union, complement and "exactly one", each done when looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema import arrays, objects
from tureen.grammar.schema.key_sets import KeySets
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.shapes import (
    OBJECTS,
    PLAIN,
    STRINGS,
    ArrayShape,
    Kind,
    ObjectShape,
    PropertySet,
    ValueSet,
    ValueShape,
)
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.unions import Unions

MAX_NODES = 20_000
MAX_LOOK = 4
"""How many levels down a proof of emptiness is looked for. Where none is found the grammar's rules tell in the end."""


class CircularError(GrammarError):
    """A set was needed to find out what it is itself."""


class Algebra:
    """Makes nodes and looks into them. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, frozenset[ValueSet]], ValueSet] = {}
        self._depth = 0
        self.keys = KeySets()
        self.nothing = ValueSet("leaf")
        self.no_shape = self.nothing.shape = ValueShape()
        self.anything = ValueSet("leaf")
        self.nothing.opposite, self.anything.opposite = self.anything, self.nothing
        self.any_array = ArrayShape((), self.anything)
        self.any_object = ObjectShape({}, (PropertySet(self.keys.every, self.anything),))
        self.arrays: Unions[ArrayShape] = Unions(
            "arrays",
            self.any_array,
            partial(arrays.covers, self),
            partial(arrays.meet, self),
            partial(arrays.complement, self),
        )
        self.objects: Unions[ObjectShape] = Unions(
            "objects",
            self.any_object,
            partial(objects.covers, self),
            partial(objects.meet, self),
            partial(objects.complement, self),
        )
        self.any_shape = self.anything.shape = ValueShape(
            PLAIN, NumberSet.anything(), StringSet.anything(), (self.any_array,), (self.any_object,)
        )

    def leaf(self, read: Callable[[], ValueShape]) -> ValueSet:
        """Returns a set that `read` describes, later."""
        return ValueSet("leaf", (), read)

    def fixed(self, shape: ValueShape) -> ValueSet:
        """Returns the set of the values of a shape that is known."""
        node = ValueSet("leaf")
        node.shape = shape
        return node

    def all_of(self, nodes: Iterable[ValueSet]) -> ValueSet:
        """Returns the intersection of the sets; without any, all values."""
        return self._combined("all", nodes, self.anything, self.nothing)

    def any_of(self, nodes: Iterable[ValueSet]) -> ValueSet:
        """Returns the union of the sets; without any, the empty set."""
        return self._combined("any", nodes, self.nothing, self.anything)

    def one_of(self, nodes: Iterable[ValueSet]) -> ValueSet:
        """Returns the values of exactly one of the nodes."""
        parts = tuple(node for node in nodes if node is not self.nothing)
        if not parts:
            return self.nothing
        return parts[0] if len(parts) == 1 else ValueSet("one", parts)

    def none_of(self, node: ValueSet) -> ValueSet:
        """Returns the complement."""
        if node.opposite is None:
            opposite = self.any_of(map(self.none_of, node.parts)) if node.kind == "all" else ValueSet("not", (node,))
            node.opposite, opposite.opposite = opposite, node
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
                raise GrammarError(
                    f"its combination of allOf, anyOf, oneOf, not, if, … is too large: more than"
                    f" {MAX_NODES} schemas arise from it"
                )
            known = self._known[key] = ValueSet(kind, tuple(parts))
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
                node.shape = self._look(node)
            finally:
                node.busy = False
        return node.shape

    def _look(self, node: ValueSet) -> ValueShape:
        if node.read is not None:
            return node.read()
        shapes = [self.shape(part) for part in node.parts]
        if node.kind == "all":
            shape = shapes[0]
            for other in shapes[1:]:
                shape = self.meet(shape, other)
            return shape
        if node.kind == "any":
            return self.join(shapes)
        return self.complement(shapes[0]) if node.kind == "not" else self.exactly_one(shapes)

    def is_nothing(self, node: ValueSet) -> bool:
        """Returns True only where it is certain, which is tried by looking a few levels deep."""
        if node is self.nothing or node is self.anything:
            return node is self.nothing
        level = self._depth
        if level >= MAX_LOOK or (node.seen_from is not None and node.seen_from <= level):
            return False
        self._depth += 1
        try:
            is_nothing = self._is_nothing(self.shape(node))
        except CircularError:
            is_nothing = False
        finally:
            self._depth -= 1
        if is_nothing:
            node.shape = self.no_shape
        else:
            node.seen_from = level
        return is_nothing

    def _is_nothing(self, shape: ValueShape) -> bool:
        return (
            not shape.plain
            and not shape.partial
            and all(arrays.is_empty(self, item) for item in shape.arrays)
            and all(objects.is_empty(self, item) for item in shape.objects)
            and shape.numbers.is_empty()
            and shape.strings.is_empty()
        )

    def meet(self, first: ValueShape, second: ValueShape) -> ValueShape:
        """Returns the values that are in both."""
        if first is self.any_shape or second is self.any_shape:
            return second if first is self.any_shape else first
        return ValueShape(
            first.plain & second.plain,
            first.numbers.intersect(second.numbers),
            first.strings.intersect(second.strings),
            self.arrays.meet(first.arrays, second.arrays),
            self.objects.meet(first.objects, second.objects),
            _partial_in(first, second) | _partial_in(second, first) if first.partial or second.partial else 0,
        )

    def join(self, shapes: list[ValueShape]) -> ValueShape:
        """Returns the values that are in any of them."""
        scalars = self.no_shape
        for shape in shapes:
            scalars = _scalars_of_both(scalars, shape)
        return replace(
            scalars,
            arrays=self.arrays.join(item for shape in shapes for item in shape.arrays),
            objects=self.objects.join(item for shape in shapes for item in shape.objects),
            partial=_partial(shapes),
        )

    def complement(self, shape: ValueShape) -> ValueShape:
        """Returns the values that are not in it."""
        if shape.partial:
            raise _half_known(shape.partial)
        return ValueShape(
            shape.plain ^ PLAIN,
            shape.numbers.complement(),
            shape.strings.complement(),
            self.arrays.complement(shape.arrays),
            self.objects.complement(shape.objects),
        )

    def exactly_one(self, shapes: list[ValueShape]) -> ValueShape:
        """Returns the values that are in one of them and no other."""
        partial = _partial(shapes)
        if partial & STRINGS and sum(not shape.strings.is_empty() for shape in shapes) > 1:
            raise _half_known(STRINGS)
        if partial & OBJECTS and sum(bool(shape.objects) for shape in shapes) > 1:
            raise _half_known(OBJECTS)
        seen = once = self.no_shape
        for shape in shapes:
            once, seen = _once(seen, once, shape), _scalars_of_both(seen, shape)
        return replace(
            once,
            arrays=self.arrays.exactly_one([shape.arrays for shape in shapes]),
            objects=self.objects.exactly_one([shape.objects for shape in shapes]),
            partial=_partial(shapes),
        )


def _scalars_of_both(first: ValueShape, second: ValueShape) -> ValueShape:
    return ValueShape(
        first.plain | second.plain, first.numbers.union(second.numbers), first.strings.union(second.strings)
    )


def _once(seen: ValueShape, once: ValueShape, new: ValueShape) -> ValueShape:
    """Returns the values that are in one shape only; `once` and `seen` are those in one and in any of the shapes before
    `new`."""
    return ValueShape(
        (once.plain & ~new.plain) | (new.plain & ~seen.plain),
        once.numbers.minus(new.numbers).union(new.numbers.minus(seen.numbers)),
        once.strings.minus(new.strings).union(new.strings.minus(seen.strings)),
    )


def _partial(shapes: list[ValueShape]) -> int:
    flags = 0
    for shape in shapes:
        flags |= shape.partial
    return flags


def _partial_in(shape: ValueShape, other: ValueShape) -> int:
    """Returns the kinds that are partial in the shape, and not certainly missing in the other one."""
    strings = STRINGS if other.partial & STRINGS or not other.strings.is_empty() else 0
    objects = OBJECTS if other.partial & OBJECTS or other.objects else 0
    return shape.partial & (strings | objects)


def _half_known(partial: int) -> GrammarError:
    name = '"format"' if partial & STRINGS else '"discriminator"'
    return GrammarError(
        f'{name} cannot be enforced under "not", "oneOf" or "if", where all other values have to be known:'
        f" leave it out there"
    )
