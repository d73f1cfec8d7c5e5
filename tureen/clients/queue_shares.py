"""Decides which waiting requests lose their places when the queue is full and a client has less than its share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from tureen.clients.quotas import Account, ClientWork


class WaitingRun(Protocol):
    """The requests of one body before any of them has begun. They keep or lose their places together."""

    work: ClientWork
    outputs: Sequence[Any]


Waiting = TypeVar("Waiting", bound=WaitingRun)


def runs_to_displace(
    waiting: Iterable[Waiting], account: Account, num_requests: int, num_free: int
) -> list[Waiting] | None:
    """Return the runs to end so that `num_requests` more of the client `account` fit, or None if the client would then
    hold more than its share.

    The clients that wait, `account` included, share the places of `waiting` and the `num_free` free ones in proportion
    to their weights. Each victim is the newest run of the client that is furthest above its share.

    waiting: the runs in the order of their arrival. num_free: may be negative.
    """
    held: Counter[Account] = Counter()
    runs: defaultdict[Account, list[Waiting]] = defaultdict(list)
    for run in waiting:
        held[run.work.account] += len(run.outputs)
        runs[run.work.account].append(run)
    per_weight = (held.total() + num_free) / sum(each.limits.weight for each in {*held, account})

    def excess(each: Account) -> float:
        return held[each] - per_weight * each.limits.weight

    if excess(account) + num_requests > 0:
        return None
    chosen = []
    num_lacking = num_requests - num_free
    while num_lacking > 0:
        run = runs[max(runs, key=excess)].pop()
        held[run.work.account] -= len(run.outputs)
        num_lacking -= len(run.outputs)
        chosen.append(run)
    return chosen
