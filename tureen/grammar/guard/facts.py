"""The facts that a guard holds an output to, as plain data: one process finds them, another enforces them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

NOWHERE = -1
"""The node of values in which nothing is guarded."""

THE_END = -1
"""The step behind which nothing is guarded any more."""


class GuardNode(msgspec.Struct, frozen=True, array_like=True):
    """The facts that values at one place are held to, and the nodes of what they hold."""

    is_unique: bool = False  # no two items are equal
    least_keys: int = 0  # of an object; where it is set, no key comes twice
    step: tuple[int, int] | None = None  # numbers are multiples of step[0] / 10 ** step[1]
    bounds: tuple[str | None, str | None] = (None, None)  # of numbers with a step, as fractions
    first_items: tuple[int, ...] = ()
    items: int = NOWHERE  # of those behind the first
    keys: Mapping[str, int] = {}
    others: int = NOWHERE  # of the values of other keys

    @property
    def inner(self) -> tuple[int, ...]:
        """Returns the nodes of what is inside."""
        return (*self.first_items, self.items, *self.keys.values(), self.others)

    @property
    def says_something(self) -> bool:
        return self.is_unique or self.least_keys > 0 or self.step is not None

    def moved(self, count: int) -> GuardNode:
        """Returns the node where so many nodes stand before the first of its list."""

        def moved(node: int) -> int:
            return node if node == NOWHERE else node + count

        return msgspec.structs.replace(
            self,
            first_items=tuple(map(moved, self.first_items)),
            items=moved(self.items),
            keys={key: moved(node) for key, node in self.keys.items()},
            others=moved(self.others),
        )


class FixedStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """One of these texts comes, none of which begins another, and then the step beside it."""

    texts: tuple[tuple[bytes, int], ...]
    otherwise: int | None = None  # where what comes is the beginning of none; None: it always is


class FreeStep(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Free text comes, up to the first of these texts and with it, and then the step beside it."""

    stops: tuple[tuple[bytes, int], ...]


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
