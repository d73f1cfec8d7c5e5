"""Sets of objects: what two shapes have in common, and what a shape leaves out."""

from __future__ import annotations

from dataclasses import replace

from tureen.grammar.schema.arrays import lesser
from tureen.grammar.schema.protocols import SetAlgebra
from tureen.grammar.schema.shapes import ObjectShape, Property, PropertySet, ValueSet


def node_of(shape: ObjectShape, key: str) -> ValueSet:
    """Returns the set that the value of this key must be in, if the key is there."""
    field = shape.named.get(key)
    if field is not None:
        return field.node
    if len(shape.free) == 1:
        return shape.free[0].node
    return next(keys.node for keys in shape.free if keys.names.contains(key))


def meet(algebra: SetAlgebra, first: ObjectShape, second: ObjectShape) -> list[ObjectShape]:
    """Returns the objects of both, as shapes that are not known to be empty."""
    names = dict.fromkeys((*first.named, *second.named))
    required = first.required | second.required
    nodes = {key: algebra.all_of((node_of(first, key), node_of(second, key))) for key in names if key in required}
    if any(map(algebra.is_nothing, nodes.values())):
        return []  # most shapes that are disjoint are so by a key that both require
    named = {}
    for key in names:
        node = nodes.get(key)
        if node is None:
            node = algebra.all_of((node_of(first, key), node_of(second, key)))
        named[key] = Property(key in required, node)
    shapes = [
        ObjectShape(
            named,
            _free(algebra, first.free, second.free),
            max(first.least, second.least),
            lesser(first.most, second.most),
            is_open=first.is_open or second.is_open,
        )
    ]
    for own, other in ((first, second), (second, first)):
        for needed in own.needed:
            hidden = [key for key in other.named if key not in own.named and needed.names.contains(key)]
            shapes = [narrowed for shape in shapes for narrowed in _with_required(algebra, shape, needed, hidden)]
    return [shape for shape in shapes if not is_empty(algebra, shape)]


def complement(algebra: SetAlgebra, shape: ObjectShape) -> list[ObjectShape]:
    """Returns the objects that are not in `shape`; the shapes may overlap."""
    anything = algebra.anything
    everything = algebra.any_object
    shapes = []
    for key, (is_required, node) in shape.named.items():
        # A key that is required is missing, or has a wrong value; one that is not required has a wrong value.
        if is_required or node is not anything:
            shapes.append(replace(everything, named={key: Property(not is_required, algebra.none_of(node))}))
    loose = {key: Property(False, anything) for key in shape.named}
    for names, node in shape.free:
        if node is not anything:
            shapes.append(replace(everything, named=loose, needed=(PropertySet(names, algebra.none_of(node)),)))
    if shape.least > 0:
        shapes.append(replace(everything, most=shape.least - 1))
    if shape.most is not None:
        shapes.append(replace(everything, least=shape.most + 1))
    for names, node in shape.needed:
        free = (PropertySet(names, algebra.none_of(node)), PropertySet(algebra.keys.outside(names), anything))
        shapes.append(replace(everything, named=loose, free=free))
    return shapes


def is_empty(algebra: SetAlgebra, shape: ObjectShape) -> bool:
    """Returns True only where it is certain that nothing is in it."""
    required = [shape.named[key].node for key in shape.named if key in shape.required]
    if shape.most is not None and max(shape.least, len(required)) > shape.most:
        return True
    is_closed = all(keys.node is algebra.nothing for keys in shape.free)
    if is_closed and (shape.needed or shape.least > len(shape.named)):
        return True
    return any(algebra.is_nothing(node) for node in required) or any(
        _is_hopeless(algebra, shape, keys) for keys in shape.needed
    )


def covers(algebra: SetAlgebra, shape: ObjectShape, other: ObjectShape) -> bool:
    """Returns whether the shape certainly has all objects of the other one."""
    if shape is other or shape is algebra.any_object:
        return True
    return (
        shape.required <= other.required
        and shape.least <= other.least
        and lesser(shape.most, other.most) == other.most
        and (not shape.needed or (set(shape.needed) <= set(other.needed) and shape.named.keys() <= other.named.keys()))
        and _named_covers(algebra, shape, other)
        and _free_covers(algebra, shape.free, other.free)
    )


def _named_covers(algebra: SetAlgebra, shape: ObjectShape, other: ObjectShape) -> bool:
    """Whether the shape has all values of the keys that either of them names."""
    anything, covers_node = algebra.anything, algebra.covers
    for key, (_, node) in shape.named.items():
        if node is not anything and not covers_node(node, node_of(other, key)):
            return False
    if len(shape.free) == 1 and shape.free[0].node is anything:
        return True
    others = other.named.keys() - shape.named.keys()
    return all(covers_node(node_of(shape, key), other.named[key].node) for key in others)


def _free_covers(algebra: SetAlgebra, free: tuple[PropertySet, ...], other: tuple[PropertySet, ...]) -> bool:
    if len(free) == 1:
        return all(algebra.covers(free[0].node, keys.node) for keys in other)
    if len(other) == 1:
        return all(algebra.covers(keys.node, other[0].node) for keys in free)
    return free == other


def _is_hopeless(algebra: SetAlgebra, shape: ObjectShape, required: PropertySet) -> bool:
    return all(
        algebra.is_nothing(algebra.all_of((keys.node, required.node)))
        or algebra.keys.both(keys.names, required.names).is_empty()
        for keys in shape.free
    )


def _free(
    algebra: SetAlgebra, first: tuple[PropertySet, ...], second: tuple[PropertySet, ...]
) -> tuple[PropertySet, ...]:
    if len(first) == 1 or len(second) == 1:
        return tuple(
            PropertySet(left.names if len(second) == 1 else right.names, algebra.all_of((left.node, right.node)))
            for left in first
            for right in second
        )
    common = []
    for left in first:
        for right in second:
            names = algebra.keys.both(left.names, right.names)
            if not names.is_empty():
                common.append(PropertySet(names, algebra.all_of((left.node, right.node))))
    algebra.keys.check(len(common))
    return tuple(common)


def _with_required(algebra: SetAlgebra, shape: ObjectShape, keys: PropertySet, hidden: list[str]) -> list[ObjectShape]:
    """One of `hidden`, which the shape names, is there with such a value; or a free key."""
    shapes = [shape if keys in shape.needed else replace(shape, needed=(*shape.needed, keys))]
    for key in hidden:
        node = algebra.all_of((shape.named[key].node, keys.node))
        shapes.append(replace(shape, named={**shape.named, key: Property(True, node)}))
    return shapes
