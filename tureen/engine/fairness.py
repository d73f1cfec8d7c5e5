"""Equal shares for clients that wait at the same time: the virtual token counter of "Fairness in Serving Large Language
Models" (Sheng et al., arXiv:2401.00588, algorithm 2), weighted by client."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from itertools import groupby

from tureen.engine.queue import QueueOrder, Rank
from tureen.engine.sequence import Sequence

PROMPT_COST = 1  # of a prompt token that had to be computed; counted when its request is admitted
OUTPUT_COST = 2  # of an output token, as in the paper
WAIT_COST = 1000  # of a second that others waited for a client's code: about what they could have had in it

Claimant = tuple[bool, str]
"""A client, apart for its work that runs when idle: what that was served takes nothing from the client's other work."""


class LeastServedFirst(QueueOrder):
    """Serves first the client, among those that wait, that was served least; a client's own requests come as ranked.

    Priorities and preempted sequences, which were admitted before, come first as ever. While two clients wait, what
    they are served, over their weights, differs by at most twice the larger of what a prompt and what all that runs at
    once can cost, as the paper proves. Nobody is held up while there is room.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._served: dict[Claimant, float] = {}  # cost over weight
        self._last_admitted: dict[bool, Claimant] = {}  # by whether it runs when idle

    def arrange(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        """Yields the waiting sequences in order. It is lazy: what is admitted meanwhile counts for the rest."""
        if len({_claimant(sequence) for sequence in waiting}) < 2:
            yield from waiting
            return
        for _, level in groupby(waiting, key=lambda sequence: self._rank(sequence)[:-1]):
            equal = list(level)
            yield from equal if equal[0].is_resuming else self._in_turns(equal)

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
        """Raises the counter of a client that did not wait to that of the least served: it has no claim to what others
        got."""
        claimant = _claimant(sequence)
        of_its_kind = {other for other in map(_claimant, waiting) if other[0] == claimant[0]}
        others = of_its_kind or {self._last_admitted.get(claimant[0], (claimant[0], ""))}
        if claimant not in others and not sequence.is_resuming:
            self._served[claimant] = max(self._counter(claimant), min(map(self._counter, others)))

    def admitted(self, sequence: Sequence) -> None:
        claimant = _claimant(sequence)
        self._last_admitted[claimant[0]] = claimant
        self._charge(sequence, PROMPT_COST * (sequence.terms.num_prompt - (sequence.num_cached or 0)))

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
