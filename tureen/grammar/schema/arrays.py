"""Sets of arrays: what two shapes have in common, and what a shape leaves out."""

from __future__ import annotations

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema.protocols import SetAlgebra
from tureen.grammar.schema.shapes import ArrayShape, ItemCount, ValueSet


def item_at(shape: ArrayShape, index: int) -> ValueSet:
    """Returns the set that the item at this index is in."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def meet(algebra: SetAlgebra, first: ArrayShape, second: ArrayShape) -> list[ArrayShape]:
    """Returns the arrays of both, as shapes that are not known to be empty."""
    length = max(len(first.prefix), len(second.prefix))
    shape = tidy(
        algebra,
        ArrayShape(
            tuple(algebra.both(item_at(first, i), item_at(second, i)) for i in range(length)),
            algebra.both(first.rest, second.rest),
            max(first.least, second.least),
            lesser(first.most, second.most),
            _merged(first.counts + second.counts),
            first.is_unique or second.is_unique,
        ),
    )
    return [] if shape is None or is_empty(algebra, shape) else [shape]


def complement(algebra: SetAlgebra, shape: ArrayShape) -> list[ArrayShape]:
    """Returns the arrays that are not in `shape`; the shapes may overlap. Raises GrammarError."""
    if shape.is_unique:
        raise GrammarError('"uniqueItems": true cannot be enforced under "not", "oneOf" or "if": leave it out there')
    anything = algebra.anything
    shapes = []
    if shape.least > 0:
        shapes.append(ArrayShape((), anything, 0, shape.least - 1))
    if shape.most is not None:
        shapes.append(ArrayShape((), anything, shape.most + 1))
    for index, node in enumerate(shape.prefix):
        if node is not anything:
            shapes.append(ArrayShape((*[anything] * index, algebra.none_of(node)), anything, index + 1))
    if shape.rest is not anything:
        outside = ItemCount(len(shape.prefix), algebra.none_of(shape.rest), 1, None)
        shapes.append(ArrayShape((), anything, counts=(outside,)))
    for start, node, least, most in shape.counts:
        if least > 0:
            shapes.append(ArrayShape((), anything, counts=(ItemCount(start, node, 0, least - 1),)))
        if most is not None:
            shapes.append(ArrayShape((), anything, counts=(ItemCount(start, node, most + 1, None),)))
    tidied = (tidy(algebra, item) for item in shapes)
    return [item for item in tidied if item is not None]


def tidy(algebra: SetAlgebra, shape: ArrayShape) -> ArrayShape | None:
    """Returns the same arrays, with what the number of items can say said by it. None: no array."""
    counted = _tidy_counts(algebra, shape)
    if counted is None:
        return None
    item_counts, least, most = counted
    prefix, rest = shape.prefix, shape.rest
    if algebra.nothing in prefix:
        most = lesser(most, prefix.index(algebra.nothing))
    if rest is algebra.nothing:
        most = lesser(most, len(prefix))
    if most is not None:
        if most < least:
            return None
        prefix = prefix[:most]
        rest = algebra.nothing if most == len(prefix) else rest
    while prefix and prefix[-1] is rest:
        prefix = prefix[:-1]
    return ArrayShape(prefix, rest, least, most, item_counts, shape.is_unique and (most is None or most > 1))


def _tidy_counts(algebra: SetAlgebra, shape: ArrayShape) -> tuple[tuple[ItemCount, ...], int, int | None] | None:
    """Returns the counts that remain, and how many items there can be. None: no array."""
    kept, least, most = [], shape.least, shape.most
    for want in shape.counts:
        if want.least > 0:
            if want.node is algebra.nothing or (want.most is not None and want.least > want.most):
                return None
            least = max(least, want.start + want.least)
        if want.node is algebra.anything:
            most = most if want.most is None else lesser(most, want.start + want.most)
        elif want.node is not algebra.nothing and (want.least > 0 or want.most is not None):
            kept.append(want)
    return tuple(kept), least, most


def is_empty(algebra: SetAlgebra, shape: ArrayShape) -> bool:
    """Returns True only where it is certain that nothing is in it."""
    if any(algebra.is_nothing(node) for node in shape.prefix[: shape.least]):
        return True
    if shape.least > len(shape.prefix) and algebra.is_nothing(shape.rest):
        return True
    for want in shape.counts:
        places = [*shape.prefix[want.start :], shape.rest]
        if want.least and all(algebra.is_nothing(algebra.both(want.node, place)) for place in places):
            return True
    return False


def covers(algebra: SetAlgebra, shape: ArrayShape, other: ArrayShape) -> bool:
    """Returns whether the shape certainly has all arrays of the other one."""
    if shape is other or shape is algebra.any_array:
        return True
    return (
        shape.least <= other.least
        and lesser(shape.most, other.most) == other.most
        and shape.is_unique <= other.is_unique
        and all(want in other.counts for want in shape.counts)
        and algebra.covers(shape.rest, other.rest)
        and all(
            algebra.covers(item_at(shape, index), item_at(other, index))
            for index in range(max(len(shape.prefix), len(other.prefix)))
        )
    )


def lesser(first: int | None, second: int | None) -> int | None:
    """Returns the lesser of two upper bounds, None being no bound."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _merged(item_counts: tuple[ItemCount, ...]) -> tuple[ItemCount, ...]:
    merged: dict[tuple[int, ValueSet], ItemCount] = {}
    for count in item_counts:
        key = (count.start, count.node)
        known = merged.get(key)
        if known is None:
            merged[key] = count
        else:
            merged[key] = ItemCount(*key, max(known.least, count.least), lesser(known.most, count.most))
    return tuple(merged.values())
