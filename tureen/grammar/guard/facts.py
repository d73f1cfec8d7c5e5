"""The facts that a guard holds an output to, as plain data: one process finds them, another enforces them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

NOWHERE = -1
"""The node of values in which nothing is guarded."""

THE_END = -1
"""The step behind which nothing is guarded any more."""


def _moved(number: int, count: int) -> int:
    return number if number == NOWHERE else number + count


class KeySet(msgspec.Struct, frozen=True, array_like=True):
    """A set of keys, as a deterministic automaton that starts in state 0."""

    moves: tuple[tuple[tuple[int, int, int], ...], ...]  # by state: first and last code point and target, sorted
    accepting: tuple[bool, ...]

    def __contains__(self, key: str) -> bool:
        state = 0
        for char in key:
            moves = self.moves[state]
            at = bisect_right(moves, ord(char), key=lambda move: move[0]) - 1
            if at < 0 or moves[at][1] < ord(char):
                return False
            state = moves[at][2]
        return self.accepting[state]


class Variant(msgspec.Struct, frozen=True, array_like=True):
    """One of several things that a value can be: it is held to a node, and its text is in the language of a branch."""

    node: int
    branch: int  # NOWHERE: whatever the grammar allows
    counts: bool = False  # an item that is this is counted

    def moved(self, nodes: int, branches: int) -> Variant:
        """Returns the variant with the numbers of its nodes and branches moved by offsets."""
        return Variant(_moved(self.node, nodes), _moved(self.branch, branches), self.counts)


class CountedItems(msgspec.Struct, frozen=True, array_like=True):
    """How many items of an array, from the index `start` on, are of one kind, and what each item can be."""

    start: int
    least: int
    most: int | None
    most_items: int | None  # of the array
    first: tuple[tuple[Variant, ...], ...]
    rest: tuple[Variant, ...]  # of items behind the first

    def variants(self, index: int) -> tuple[Variant, ...]:
        """Returns what the item at an index can be."""
        return self.first[index] if index < len(self.first) else self.rest


class GuardNode(msgspec.Struct, frozen=True, array_like=True):
    """The facts that values at one place are held to, and the nodes of what they hold."""

    is_unique: bool = False  # no two items are equal
    least_keys: int = 0  # of an object; where it is set, no key comes twice
    step: tuple[int, int] | None = None  # numbers are multiples of step[0] / 10 ** step[1]
    bounds: tuple[str | None, str | None] = (None, None)  # of numbers with a step, as fractions
    first_items: tuple[int, ...] = ()
    items: int = NOWHERE  # of those behind the first
    keys: Mapping[str, int] = {}
    key_sets: tuple[tuple[KeySet, int], ...] = ()  # the nodes of the values of other keys; of keys in none of the sets:
    others: int = NOWHERE
    arrays: tuple[Variant, ...] = ()  # what an array can be, where that is not certain
    objects: tuple[Variant, ...] = ()  # and an object
    count: CountedItems | None = None

    def node_of(self, key: str) -> int:
        """Returns the node of a key's value."""
        if key in self.keys:
            return self.keys[key]
        return next((node for keys, node in self.key_sets if key in keys), self.others)

    def moved(self, nodes: int, branches: int) -> GuardNode:
        """Returns the node with the numbers of nodes and branches moved by offsets."""

        def moved(node: int) -> int:
            return _moved(node, nodes)

        def variants(some: tuple[Variant, ...]) -> tuple[Variant, ...]:
            return tuple(variant.moved(nodes, branches) for variant in some)

        count = self.count
        if count is not None:
            first = tuple(map(variants, count.first))
            count = msgspec.structs.replace(count, first=first, rest=variants(count.rest))
        return msgspec.structs.replace(
            self,
            first_items=tuple(map(moved, self.first_items)),
            items=moved(self.items),
            keys={key: moved(node) for key, node in self.keys.items()},
            key_sets=tuple((keys, moved(node)) for keys, node in self.key_sets),
            others=moved(self.others),
            arrays=variants(self.arrays),
            objects=variants(self.objects),
            count=count,
        )


class FixedStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """One of these texts comes, none of which begins another, and then the step beside it."""

    texts: tuple[tuple[bytes, int], ...]
    otherwise: int | None = None  # where what comes is the beginning of none; None: it always is


class FreeStep(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Free text comes, up to the first of these texts and with it, and then the step beside it. Without such texts it
    goes on to the end."""

    stops: tuple[tuple[bytes, int], ...]
    most_tokens: int | None = None  # the most that may hold some of the free text
    never: tuple[bytes, ...] = ()  # the free text is none of these


class ValueStep(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A JSON value comes, which is held to a node, and then another step."""

    node: int
    then: int
    free: int | None = None  # the step instead, where neither an array nor an object comes


class KeyStep(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A key comes, up to the first of some texts and with it. The step behind the text with a number depends on the
    key."""

    stops: tuple[bytes, ...]
    keys: Mapping[str, tuple[int, ...]]
    others: tuple[int, ...]


Step: TypeAlias = FixedStep | FreeStep | ValueStep | KeyStep


class GuardFacts(msgspec.Struct, frozen=True, array_like=True):
    """All that is guarded in an output: the steps lead to its values, the nodes say what these are held to."""

    nodes: tuple[GuardNode, ...]
    steps: tuple[Step, ...] = (ValueStep(0, THE_END),)
    start: int = 0

    def after(self, marker: str) -> GuardFacts:
        """Returns the facts of an output that has free text before it, up to a marker."""
        free = FreeStep(((marker.encode(), self.start),))
        return msgspec.structs.replace(self, steps=(*self.steps, free), start=len(self.steps))
