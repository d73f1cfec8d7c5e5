"""Results for large expressions, which one constraint asks for many times, and all constraints for those of formats."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from tureen.grammar.expression import Expression

T = TypeVar("T")

MAX_KNOWN = 8192


class Remembered(Generic[T]):
    """Results by the identity of an expression, because to hash a large one takes longer than most results do."""

    def __init__(self) -> None:
        # With the expressions, so that no other one gets the `id` of one of them.
        self._known: dict[tuple[int, Hashable], tuple[Expression, T]] = {}
        self._kept: dict[tuple[int, Hashable], tuple[Expression, T]] = {}
        _every.append(self)

    def get(self, expression: Expression, make: Callable[[], T], variant: Hashable = None) -> T:
        """Returns what `make` returned for this expression, and this variant of the question, the first time."""
        key = id(expression), variant
        known = self._known.get(key)
        if known is None:
            result = make()
            if len(self._known) >= MAX_KNOWN:
                self.forget()
            known = self._known[key] = expression, result
        return known[1]

    def keep(self) -> None:
        """Keeps what is known until the process ends."""
        self._kept = dict(self._known)

    def forget(self) -> None:
        """Forgets what is not kept."""
        self._known = dict(self._kept)


_every: list[Remembered[Any]] = []


def keep_all() -> None:
    """Keeps all results that are known until the process ends."""
    for remembered in _every:
        remembered.keep()


def forget_all() -> None:
    """Forgets all results that are not kept: those of the constraint before, which may be large."""
    for remembered in _every:
        remembered.forget()
