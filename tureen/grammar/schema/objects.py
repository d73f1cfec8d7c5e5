"""Sets of objects: what two shapes have in common, and what a shape leaves out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from tureen.grammar.schema.arrays import lesser
from tureen.grammar.schema.protocols import SetAlgebra
from tureen.grammar.schema.shapes import ObjectShape, Property, PropertySet, ValueSet
from tureen.grammar.schema.unions import Traits


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
    named = _named_of_both(algebra, first, second)
    if named is None:
        return []
    shapes = [
        ObjectShape(
            named,
            _free(algebra, first, second),
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


def may_meet(algebra: SetAlgebra, first: ObjectShape, second: ObjectShape) -> bool:
    """Returns whether `meet` would return any shape: mostly the keys that one of both requires tell."""
    if first.needed or second.needed or first.least or second.least or (first.most, second.most) != (None, None):
        return bool(meet(algebra, first, second))
    required = first.required | second.required
    keys = [key for key in dict.fromkeys((*first.named, *second.named)) if key in required] if required else ()
    return not any(algebra.is_nothing(algebra.both(node_of(first, key), node_of(second, key))) for key in keys)


def _named_of_both(algebra: SetAlgebra, first: ObjectShape, second: ObjectShape) -> dict[str, Property] | None:
    """Returns the keys that either shape names, those of `first` first. None: no object, as most shapes that are
    disjoint are so by a key that both require."""
    keys: Iterable[str] = second.named
    if not _leaves_others(algebra, second):
        keys = dict.fromkeys((*first.named, *keys))
    required = first.required | second.required
    nodes = {}
    for key in keys if required else ():
        if key in required:
            nodes[key] = algebra.both(node_of(first, key), node_of(second, key))
            if algebra.is_nothing(nodes[key]):
                return None
    named = dict(first.named)
    for key in keys:
        is_required = key in nodes
        node = nodes[key] if is_required else algebra.both(node_of(first, key), node_of(second, key))
        own = named.get(key)
        if own is None or own.node is not node or own.is_required is not is_required:
            named[key] = Property(is_required, node)
    return named


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
    required = [shape.named[key].node for key in shape.named if key in shape.required] if shape.required else []
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
        and shape.least <= max(other.least, len(other.required) + bool(other.needed))
        and lesser(shape.most, other.most) == other.most
        and (not shape.needed or (set(shape.needed) <= set(other.needed) and shape.named.keys() <= other.named.keys()))
        and _named_covers(algebra, shape, other)
        and _free_covers(algebra, shape.free, other.free)
    )


def traits(algebra: SetAlgebra, shape: ObjectShape) -> Traits:
    """Returns keys that are required, and sets that the value of a key is in."""
    few: list[Hashable] = [keys.node for keys in shape.needed]
    more: list[Hashable] = []
    leaves_others = _leaves_others(algebra, shape)
    for key, (is_required, node) in shape.named.items():
        known = few if is_required else more
        if is_required:
            few.append(key)
        if node.kind == "all":
            known += [(key, part) for part in node.parts]
        elif node is not algebra.anything:
            known.append((key, node))
        leaves_others = leaves_others and node is not algebra.nothing  # which every set covers
    return Traits(few, more if leaves_others else (), leaves_others)


def _named_covers(algebra: SetAlgebra, shape: ObjectShape, other: ObjectShape) -> bool:
    """Whether the shape has all values of the keys that either of them names."""
    anything, covers_node = algebra.anything, algebra.covers
    for key, (_, node) in shape.named.items():
        if node is not anything and not covers_node(node, node_of(other, key)):
            return False
    if _leaves_others(algebra, shape):
        return True
    others = other.named.keys() - shape.named.keys()
    return all(covers_node(node_of(shape, key), other.named[key].node) for key in others)


def _free_covers(algebra: SetAlgebra, free: tuple[PropertySet, ...], other: tuple[PropertySet, ...]) -> bool:
    if len(free) == 1:
        return all(algebra.covers(free[0].node, keys.node) for keys in other)
    if len(other) == 1:
        return all(algebra.covers(keys.node, other[0].node) for keys in free)
    return free == other


def _leaves_others(algebra: SetAlgebra, shape: ObjectShape) -> bool:
    """Whether free keys may have any value."""
    return len(shape.free) == 1 and shape.free[0].node is algebra.anything


def _is_hopeless(algebra: SetAlgebra, shape: ObjectShape, required: PropertySet) -> bool:
    return all(
        algebra.is_nothing(algebra.both(keys.node, required.node))
        or algebra.keys.both(keys.names, required.names).is_empty()
        for keys in shape.free
    )


def _free(algebra: SetAlgebra, first: ObjectShape, second: ObjectShape) -> tuple[PropertySet, ...]:
    if _leaves_others(algebra, first) or _leaves_others(algebra, second):
        return second.free if _leaves_others(algebra, first) else first.free
    if len(first.free) == 1 or len(second.free) == 1:
        return tuple(
            PropertySet(left.names if len(second.free) == 1 else right.names, algebra.both(left.node, right.node))
            for left in first.free
            for right in second.free
        )
    common = []
    for left in first.free:
        for right in second.free:
            names = algebra.keys.both(left.names, right.names)
            if not names.is_empty():
                common.append(PropertySet(names, algebra.both(left.node, right.node)))
    algebra.keys.check(len(common))
    return tuple(common)


def _with_required(algebra: SetAlgebra, shape: ObjectShape, keys: PropertySet, hidden: list[str]) -> list[ObjectShape]:
    """One of `hidden`, which the shape names, is there with such a value; or a free key. Not those that are visibly
    empty."""
    shapes = [shape if keys in shape.needed else replace(shape, needed=(*shape.needed, keys))]
    for key in hidden:
        node = algebra.both(shape.named[key].node, keys.node)
        if not algebra.is_nothing(node):
            shapes.append(replace(shape, named={**shape.named, key: Property(True, node)}))
    return shapes
