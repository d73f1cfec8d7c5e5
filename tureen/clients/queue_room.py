"""Admits requests to an engine's queue. If the queue is full, a client's share decides."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from tureen.clients.quotas import current_work
from tureen.config import Config
from tureen.contract.types import EngineInfo
from tureen.errors import Unavailable
from tureen.serving.client import EngineClient

Runs = Callable[[], Iterable[Any]]


class Admitted:
    """Counts the requests of all models that have a place in a queue, except those that run when idle."""

    def __init__(self) -> None:
        self.is_idle = asyncio.Event()  # set while no request has a place
        self.is_idle.set()
        self._num = 0

    def add(self, num_more: int) -> None:
        self._num += num_more
        if self._num:
            self.is_idle.clear()
        else:
            self.is_idle.set()


class QueueRoom:
    """The places in the engine's queue. Requests that run when idle need no place. Event-loop thread only."""

    def __init__(self, client: EngineClient, info: EngineInfo, config: Config, admitted: Admitted, runs: Runs) -> None:
        """`runs`: returns the runs that hold the places, the oldest first."""
        self._client = client
        self._admitted = admitted
        self._runs = runs
        self._max_running = info.max_running_requests
        self._max_queued = config.max_queued_requests
        self._num_coming = 0  # admitted requests that are not submitted yet
        self._num_when_idle = 0  # admitted requests that run when idle
        self.leaving: set[str] = set()  # ids of displaced requests that the engine has not ended yet

    @property
    def num_free(self) -> int:
        """Number of free places. Counted here, because the engine may be in a long step."""
        num_live = self._client.num_live + self._num_coming - self._num_when_idle - len(self.leaving)
        return self._max_running + self._max_queued - max(0, num_live)

    def check(self, num_requests: int) -> None:
        """Raise Unavailable if these requests get no places, even after displacing others."""
        if num_requests > self.num_free:
            self._find_displaced(num_requests)

    @contextlib.contextmanager
    def coming(self, num_requests: int, *, when_idle: bool = False) -> Iterator[Callable[[], None]]:
        """Reserves places for requests that run inside the block. Yields a function to call just before each request is
        submitted, which frees one place.

        If too few are free, displaces waiting requests of clients that hold more than their share. Raises Unavailable
        if this client would then hold more than its own.
        """
        if not when_idle and num_requests > self.num_free:
            for run in self._find_displaced(num_requests):
                self.leaving.update(output.request.id for output in run.outputs)
                run.displace(self.refusal("and this client has more than its share"))
        num_left = num_requests
        self._num_coming += num_requests
        self._count(num_requests, when_idle)

        def submit() -> None:
            nonlocal num_left
            num_left -= 1
            self._num_coming -= 1

        try:
            yield submit
        finally:
            self._num_coming -= num_left
            self._count(-num_requests, when_idle)

    def _find_displaced(self, num_requests: int) -> list[Any]:
        shares = importlib.import_module("tureen.clients.queue_shares")  # for full queues only
        waiting = [run for run in self._runs() if run.is_waiting]
        chosen = shares.runs_to_displace(waiting, current_work().account, num_requests, self.num_free)
        if chosen is None:
            raise self.refusal("or would be with these")
        return cast(list[Any], chosen)

    def refusal(self, reason: str) -> Unavailable:
        """Return the error for a request that has no place."""
        return Unavailable(
            f"{self._max_queued} requests are waiting already, {reason}; try again later, or start the server with a "
            "larger --max-queued-requests",
            code="queue_full",
            retry_after_s=math.ceil(self._client.stats.seconds_per_end),
        )

    def _count(self, num_more: int, when_idle: bool) -> None:
        if when_idle:
            self._num_when_idle += num_more
        else:
            self._admitted.add(num_more)
