"""What was worked out for large expressions, which many constraints have in common: those of the formats, above all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tureen.grammar.expression import Expression

T = TypeVar("T")

MAX_KNOWN = 8192


class Remembered(Generic[T]):
    """Results by the identity of an expression, as to hash a large one takes longer than most results do."""

    def __init__(self) -> None:
        # With the expressions, so that no other one gets the `id` of one of them.
        self._known: dict[tuple[int, Hashable], tuple[Expression, T]] = {}

    def get(self, expression: Expression, make: Callable[[], T], variant: Hashable = None) -> T:
        """Returns what `make` returned for this expression, and this variant of the question, the first time."""
        key = id(expression), variant
        known = self._known.get(key)
        if known is None:
            made = make()
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = expression, made
        return known[1]
