"""The waiting sequences, and the orders in which the scheduler tries them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from tureen.engine.sequence import Sequence

WINDOW = 64
PROMPT_COST = 1  # of a computed prompt token; counted when its request is admitted
OUTPUT_COST = 2  # of an output token, as in the paper
WAIT_COST = 1000  # of a second that others waited for a client's code: about the tokens that they lost

Claimant = tuple[bool, str]
"""A client, and whether its work runs when idle. The two kinds have separate counters."""

Rank = Callable[[Sequence], tuple[int, ...]]


class Schedule(NamedTuple):
    """The order in which waiting sequences are tried: `fcfs`, `lpm` (longest cached prefix first) or `fair` (least
    served client first)."""

    policy: str = "fcfs"
    by_priority: bool = False


FIRST_COME = Schedule()


def first_come(sequence: Sequence) -> tuple[int, ...]:
    """Ranks sequences that run when idle last. Ranks others by preemption, preempted ones first, then by arrival."""
    return sequence.request.when_idle, not sequence.has_begun, sequence.terms.number


def priority_first(sequence: Sequence) -> tuple[int, ...]:
    """Ranks by priority, the highest first, then as `first_come`."""
    request = sequence.request
    return request.when_idle, -request.priority, not sequence.has_begun, sequence.terms.number


class QueueOrder:
    """The order in which the scheduler tries the waiting sequences: by rank, unless a subclass overrides it."""

    def arrange(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        """Returns the same sequences in the order in which they are to be tried."""
        return waiting

    def joined(self, sequence: Sequence, waiting: Many[Sequence]) -> None:
        """Called when a sequence joins those in `waiting`."""

    def admitted(self, sequence: Sequence) -> None:
        """Called when a sequence runs for the first time."""

    def held_up(self, sequence: Sequence, seconds: float) -> None:
        """Called with the seconds that others waited for code of the sequence's client."""

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        """Called when a sequence has sent more tokens of its output."""


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
    return request.when_idle, request.priority, sequence.has_begun, sequence.terms.number // WINDOW


class LeastServedFirst(QueueOrder):
    """Serves the waiting client that was served least. The requests of one client are in their ranked order.

    This is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., arXiv:2401.00588,
    algorithm 2), weighted by client.

    Priorities, and preempted sequences, which were admitted earlier, still have precedence. While two clients wait,
    their service divided by their weights differs by at most twice the larger of two costs: that of a prompt, and that
    of all concurrent sequences, as the paper proves. No client waits while there are free places.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._served: dict[Claimant, float] = {}  # cost over weight
        self._last_admitted: dict[bool, Claimant] = {}  # by whether it runs when idle

    def arrange(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        """Yields the waiting sequences in order, lazily: admissions meanwhile change the order of the rest."""
        if len({_claimant(sequence) for sequence in waiting}) < 2:
            yield from waiting
            return
        for _, level in groupby(waiting, key=lambda sequence: self._rank(sequence)[:-1]):
            equal = list(level)
            yield from equal if equal[0].has_begun else self._in_turns(equal)

    def _in_turns(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        lines: dict[Claimant, deque[Sequence]] = {}
        for sequence in waiting:
            lines.setdefault(_claimant(sequence), deque()).append(sequence)
        while lines:
            claimant = min(lines, key=self._counter)
            yield lines[claimant].popleft()
            if not lines[claimant]:
                del lines[claimant]

    def joined(self, sequence: Sequence, waiting: Many[Sequence]) -> None:
        """Raises the counter of a client that did not wait to that of the least served one, so that it cannot claim
        past service."""
        claimant = _claimant(sequence)
        of_its_kind = {other for other in map(_claimant, waiting) if other[0] == claimant[0]}
        others = of_its_kind or {self._last_admitted.get(claimant[0], (claimant[0], ""))}
        if claimant not in others and not sequence.has_begun:
            self._served[claimant] = max(self._counter(claimant), min(map(self._counter, others)))

    def admitted(self, sequence: Sequence) -> None:
        claimant = _claimant(sequence)
        self._last_admitted[claimant[0]] = claimant
        self._charge(sequence, PROMPT_COST * (sequence.terms.num_prompt - sequence.counts.cached))

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence, OUTPUT_COST * num_tokens)

    def held_up(self, sequence: Sequence, seconds: float) -> None:
        self._charge(sequence, WAIT_COST * seconds)

    def _counter(self, claimant: Claimant) -> float:
        return self._served.get(claimant, 0.0)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        claimant = _claimant(sequence)
        self._served[claimant] = self._counter(claimant) + cost / sequence.request.client_weight


def _claimant(sequence: Sequence) -> Claimant:
    return sequence.request.when_idle, sequence.request.client


class WaitingQueue:
    """Waiting sequences, kept sorted by rank."""

    def __init__(self, rank: Rank, order: QueueOrder) -> None:
        self._rank = rank
        self.order = order
        self.waiting: list[Sequence] = []  # to be changed by add and remove only

    def add(self, sequence: Sequence) -> None:
        """Inserts a sequence by its rank."""
        self.order.joined(sequence, self.waiting)
        insort(self.waiting, sequence, key=self._rank)

    def remove(self, sequence: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, self._rank(sequence), key=self._rank)]

    def candidates(self) -> Iterable[Sequence]:
        """Returns all waiting sequences in the order in which to try them. The queue may change meanwhile."""
        return self.order.arrange(tuple(self.waiting))
