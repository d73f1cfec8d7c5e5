"""The waiting sequences, and the orders in which the scheduler tries them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import takewhile
from typing import Any, NamedTuple

from tureen.engine.sequence import Sequence

WINDOW = 64

Rank = Callable[[Sequence], tuple[int, ...]]


class Schedule(NamedTuple):
    """The order in which waiting sequences are tried: `fcfs`, `lpm` (longest cached prefix first) or `fair` (least
    served client first)."""

    policy: str = "fcfs"
    by_priority: bool = False


FIRST_COME = Schedule()


def first_come(sequence: Sequence) -> tuple[int, ...]:
    """Ranks what runs when idle last; else preempted sequences first, then by arrival."""
    return sequence.request.when_idle, not sequence.is_resuming, sequence.terms.number


def priority_first(sequence: Sequence) -> tuple[int, ...]:
    """Ranks higher priority first; within one priority as `first_come`."""
    request = sequence.request
    return request.when_idle, -request.priority, not sequence.is_resuming, sequence.terms.number


class QueueOrder:
    """The order in which the scheduler tries the waiting sequences: as they are ranked, unless a subclass overrides
    it."""

    def arrange(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        """Returns the same sequences in the order in which they are to be tried."""
        return waiting

    def joined(self, sequence: Sequence, waiting: Many[Sequence]) -> None:
        """Hears that a sequence begins to wait beside `waiting`."""

    def admitted(self, sequence: Sequence) -> None:
        """Hears that a sequence runs for the first time."""

    def held_up(self, sequence: Sequence, seconds: float) -> None:
        """Hears that code of the sequence's client made others wait for so many seconds."""

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        """Hears that so many more tokens of a sequence's output are sent."""


class LongestPrefixFirst(QueueOrder):
    """Among sequences that arrived close together (in the same window of 64), tries those with more cached tokens
    first.

    The window bounds how often a sequence is passed over, and how many prefixes are looked up in a step.
    """

    def __init__(self, cached_len: Callable[[Sequence], int]) -> None:
        self._cached_len = cached_len

    def arrange(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        if not waiting:
            return waiting
        head = _window(waiting[0])
        near = list(takewhile(lambda sequence: _window(sequence) == head, waiting))
        return sorted(near, key=self._cached_len, reverse=True) + list(waiting[len(near) :])


def _window(sequence: Sequence) -> tuple[Any, ...]:
    request = sequence.request
    return request.when_idle, request.priority, sequence.is_resuming, sequence.terms.number // WINDOW


class WaitingQueue:
    """Waiting sequences, kept sorted by rank."""

    def __init__(self, rank: Rank, order: QueueOrder) -> None:
        self._rank = rank
        self.order = order
        self.waiting: list[Sequence] = []  # to be changed by add and remove only

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Inserts a sequence by its rank."""
        self.order.joined(sequence, self.waiting)
        insort(self.waiting, sequence, key=self._rank)

    def remove(self, sequence: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, self._rank(sequence), key=self._rank)]

    def candidates(self) -> Iterable[Sequence]:
        """Returns all waiting sequences in the order in which to try them; safe against changes of the queue."""
        return self.order.arrange(tuple(self.waiting))
