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


class LeastServedFirst(QueueOrder):
    """Serves first the client, among those that wait, that was served least; a client's own requests come as ranked.

    Priorities and preempted sequences, which were admitted before, come first as ever. While two clients wait, what
    they are served, over their weights, differs by at most twice the larger of what a prompt and what all that runs at
    once can cost, as the paper proves. Nobody is held up while there is room.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._served: dict[str, float] = {}  # cost over weight, by client
        self._last_admitted = ""

    def arrange(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        """Yields the waiting sequences in order. It is lazy: what is admitted meanwhile counts for the rest."""
        if len({sequence.request.client for sequence in waiting}) < 2:
            yield from waiting
            return
        for _, level in groupby(waiting, key=lambda sequence: self._rank(sequence)[:-1]):
            equal = list(level)
            yield from equal if equal[0].is_resuming else self._in_turns(equal)

    def _in_turns(self, waiting: Many[Sequence]) -> Iterable[Sequence]:
        lines: dict[str, deque[Sequence]] = {}
        for sequence in waiting:
            lines.setdefault(sequence.request.client, deque()).append(sequence)
        while lines:
            client = min(lines, key=self._counter)
            yield lines[client].popleft()
            if not lines[client]:
                del lines[client]

    def joined(self, sequence: Sequence, waiting: Many[Sequence]) -> None:
        """Raises the counter of a client that did not wait to that of the least served: it has no claim to what others
        got."""
        client = sequence.request.client
        others = {other.request.client for other in waiting} or {self._last_admitted}
        if client not in others and not sequence.is_resuming:
            self._served[client] = max(self._counter(client), min(map(self._counter, others)))

    def admitted(self, sequence: Sequence) -> None:
        self._last_admitted = sequence.request.client
        self._charge(sequence, PROMPT_COST * (sequence.terms.num_prompt - (sequence.num_cached or 0)))

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence, OUTPUT_COST * num_tokens)

    def held_up(self, sequence: Sequence, seconds: float) -> None:
        self._charge(sequence, WAIT_COST * seconds)

    def _counter(self, client: str) -> float:
        return self._served.get(client, 0.0)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        client = sequence.request.client
        self._served[client] = self._counter(client) + cost / sequence.request.client_weight
