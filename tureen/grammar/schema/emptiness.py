"""Proofs that a set of JSON values is empty."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce

from tureen.grammar.expression import GrammarError, SchemaError
from tureen.grammar.schema import arrays, objects
from tureen.grammar.schema.protocols import SetAlgebra
from tureen.grammar.schema.shapes import ValueSet, ValueShape, in_order, is_subtracted
from tureen.grammar.schema.strings import StringSet

MAX_LOOK = 4
"""How many levels down a proof of emptiness is looked for. Where none is found the grammar's rules tell in the end."""


class CircularError(SchemaError):
    """A set was needed to find out what it is itself."""


class Emptiness:
    """Looks into the sets of one algebra."""

    def __init__(self, algebra: SetAlgebra) -> None:
        self._algebra = algebra
        self._depth = 0

    def of(self, node: ValueSet) -> bool:
        """Returns True only where it is certain that nothing is in the set, which is tried by looking a few levels
        deep."""
        level = self._depth
        if level >= MAX_LOOK or (node.seen_from is not None and node.seen_from <= level):
            return False
        self._depth += 1
        try:
            is_empty = self._look(node)
        except CircularError:
            is_empty = False
        finally:
            self._depth -= 1
        if is_empty:
            node.shape = self._algebra.no_shape
        else:
            node.seen_from = level
        return is_empty

    def _look(self, node: ValueSet) -> bool:
        if node.kind == "all" and node.shape is None and not node.busy:
            are_apart = self._are_apart(node)
            if are_apart is not None:
                return are_apart
        return self._is_empty(self._algebra.shape(node))

    def _are_apart(self, node: ValueSet) -> bool | None:
        """Whether the parts of a set have nothing in common; None where that is not seen.

        The first thing in common answers it. The shape of all that they have in common may never be needed.
        """
        algebra = self._algebra
        node.busy = True
        try:
            with algebra.unenforced.at(node.origin):
                *others, last = in_order(node.parts)
                first = reduce(algebra.narrowed, others, algebra.any_shape)
                is_taken = is_subtracted(last)
                second = algebra.shape(last.parts[0] if is_taken else last)
                if first.partial | first.loose | second.partial | second.loose:
                    return None
                with suppress(GrammarError):
                    return not (self._is_left(first, second) if is_taken else self._overlap(first, second))
        finally:
            node.busy = False
        return None

    def _overlap(self, first: ValueShape, second: ValueShape) -> bool:
        """Whether two shapes may have something in common. Raises GrammarError where that takes too long to find
        out."""
        return bool(
            first.plain & second.plain
            or not first.numbers.intersect(second.numbers).is_empty()
            or not certainly_empty(self._algebra.keys.both(first.strings, second.strings))
            or self._algebra.objects.meets(first.objects, second.objects)
            or self._algebra.arrays.meets(first.arrays, second.arrays)
        )

    def _is_left(self, first: ValueShape, second: ValueShape) -> bool:
        """Whether something of the first shape may not be in the second. Raises GrammarError where that takes too long
        to find out."""
        algebra = self._algebra
        return bool(
            first.plain & ~second.plain
            or not first.numbers.minus(second.numbers).is_empty()
            or not certainly_empty(algebra.keys.minus(first.strings, second.strings))
            or any(algebra.objects.minus((shape,), second.objects) for shape in first.objects)
            or any(algebra.arrays.minus((shape,), second.arrays) for shape in first.arrays)
        )

    def _is_empty(self, shape: ValueShape) -> bool:
        return (
            not shape.plain
            and not shape.partial
            and all(arrays.is_empty(self._algebra, item) for item in shape.arrays)
            and all(objects.is_empty(self._algebra, item) for item in shape.objects)
            and shape.numbers.is_empty()
            and certainly_empty(shape.strings)
        )


def certainly_empty(strings: StringSet) -> bool:
    """Returns False also where it takes too long to find out."""
    try:
        return strings.is_empty()
    except GrammarError:
        return False
