"""The facts that a guard holds an output to, as plain data: one process finds them, another enforces them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

NOWHERE = -1
"""The node of values in which nothing is guarded."""


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


class GuardFacts(msgspec.Struct, frozen=True, array_like=True):
    """All that is guarded in an output: the node of the whole value is the first."""

    nodes: tuple[GuardNode, ...]
    after: str = ""  # the value comes after this marker; "" = at once
