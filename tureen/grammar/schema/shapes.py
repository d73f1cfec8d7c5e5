"""The shape of a set of JSON values, type by type. The sets inside arrays and objects are nodes, not looked into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.unenforced import Origin

NULL, FALSE, TRUE = 1, 2, 4
PLAIN = NULL | FALSE | TRUE
STRINGS, OBJECTS, NUMBERS, ARRAYS = 1, 2, 4, 8
ALL_KINDS = STRINGS | OBJECTS | NUMBERS | ARRAYS

Kind: TypeAlias = Literal["leaf", "all", "any", "not", "one"]


class ValueSet:
    """A set of JSON values. What was combined alike is one object; two objects may still be equal sets."""

    __slots__ = ("busy", "kind", "opposite", "origin", "parts", "read", "seen_from", "shape")

    def __init__(
        self,
        kind: Kind,
        origin: Origin,
        parts: tuple[ValueSet, ...] = (),
        read: Callable[[], ValueShape] | None = None,
    ) -> None:
        self.kind = kind
        self.origin = origin
        self.parts = parts
        self.read = read
        self.shape: ValueShape | None = None  # once it is known
        self.busy = False  # while it is being found out
        self.opposite: ValueSet | None = None  # the complement, once somebody asked for it
        self.seen_from: int | None = None  # no proof that it is empty was found, looking that deep or deeper


class ItemCount(NamedTuple):
    """`least` to `most` items, counted from index `start` on, are in `node`."""

    start: int
    node: ValueSet
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Arrays of `least` to `most` items: the first ones in the nodes of `prefix`, all others in `rest`."""

    prefix: tuple[ValueSet, ...]
    rest: ValueSet
    least: int = 0
    most: int | None = None
    counts: tuple[ItemCount, ...] = ()
    is_unique: bool = False  # no two items are equal


class Property(NamedTuple):
    """A named property: whether it must be there, and the set that its value is in."""

    is_required: bool
    node: ValueSet


class PropertySet(NamedTuple):
    """The value of every key in `names` is in `node`."""

    names: StringSet
    node: ValueSet


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Objects of `least` to `most` properties.

    Keys that are not `named` are free: the sets of `free` are disjoint and hold every string. Of each set in `needed`
    there is at least one free key whose value is in its node.
    """

    named: Mapping[str, Property]
    free: tuple[PropertySet, ...]
    least: int = 0
    most: int | None = None
    needed: tuple[PropertySet, ...] = ()
    is_open: bool = False  # the schema speaks of free keys; where it does not, no such key need be written
    required: frozenset[str] = field(init=False, compare=False)  # the named ones that must be there

    def __post_init__(self) -> None:
        required = frozenset([key for key, named in self.named.items() if named.is_required])
        object.__setattr__(self, "required", required)


@dataclass(frozen=True, slots=True)
class ValueShape:
    """The values of each type; an array or object is in one of the shapes listed (or in several)."""

    plain: int = 0  # of NULL, FALSE and TRUE
    numbers: NumberSet = field(default_factory=NumberSet.nothing)
    strings: StringSet = field(default_factory=StringSet.nothing)
    arrays: tuple[ArrayShape, ...] = ()
    objects: tuple[ObjectShape, ...] = ()
    partial: int = 0  # STRINGS, OBJECTS: of which some may be missing here ("format", "discriminator")
    loose: int = 0  # STRINGS, OBJECTS, …: of which there may be too many here, as something is not enforced


def is_subtracted(node: ValueSet) -> bool:
    """Returns whether a set is a complement that was not expanded: it is subtracted from others as it is."""
    return node.kind == "not" and node.shape is None and not node.busy


def in_order(parts: tuple[ValueSet, ...]) -> list[ValueSet]:
    """Returns the parts of an intersection, those behind that are taken from the others."""
    return sorted(parts, key=is_subtracted)
