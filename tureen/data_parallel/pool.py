"""Starts and ends replicas, as many as what there is to compute asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from tureen.data_parallel.peer_workers import Company
from tureen.data_parallel.replica import Replica
from tureen.errors import StartupError
from tureen.log import get_logger
from tureen.serving.healing import TICK_S

LOOK_S = 1.0
"""Seconds between two looks at the load."""

GROW_AFTER_S, SHRINK_AFTER_S = 10.0, 300.0
"""Seconds for which the load must ask for one replica more, or one less."""

LOW_SHARE = 0.25
"""The share of the most that a replica is to have: with less, were there one replica less, that one is not needed."""

log = get_logger("replicas")


class Scaler:
    """Judges how many replicas there should be. It has no clock of its own."""

    def __init__(self, least: int, most: int, target_tokens: int) -> None:
        """target_tokens: the most that a replica is to have to compute, where one more can be started."""
        self._least = least
        self._most = most
        self._target_tokens = target_tokens
        self._high_s = self._low_s = 0.0  # for how long the load has been so

    def judge(self, seconds: float, num_tokens: int, num_running: int) -> int:
        """Returns 1 for one replica more, -1 for one less, else 0.

        seconds: since the last time. num_tokens: to be computed by all. num_running: replicas now.
        """
        is_high = num_tokens > self._target_tokens * num_running
        is_low = num_tokens < LOW_SHARE * self._target_tokens * (num_running - 1) or not num_tokens
        self._high_s = self._high_s + seconds if is_high else 0.0
        self._low_s = self._low_s + seconds if is_low else 0.0
        change = 0
        if num_running < self._least or (self._high_s > GROW_AFTER_S and num_running < self._most):
            change = 1
        elif self._low_s > SHRINK_AFTER_S and num_running > self._least:
            change = -1
        if change:
            self._high_s = self._low_s = 0.0
        return change


class Pool:
    """Brings replicas in and out by a scaler's judgement, one at a time."""

    def __init__(self, replicas: Sequence[Replica], scaler: Scaler, company: Company) -> None:
        self._replicas = replicas
        self._company = company
        self._scaler = scaler
        self._tasks: dict[str, asyncio.Task[None]] = {}  # "watch", "change"
        self._num_holds = 0

    def begin(self) -> None:
        """Begins to look at the load."""
        self._tasks["watch"] = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends looking, and what is being changed."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Has nothing changed meanwhile; first waits for the change that is under way."""
        self._num_holds += 1
        try:
            if "change" in self._tasks:
                await asyncio.wait([self._tasks["change"]])
            yield
        finally:
            self._num_holds -= 1

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(LOOK_S)

    def look(self, seconds: float) -> None:
        """Judges the load of the last `seconds`. Begins a change, unless one is under way or none is allowed."""
        running = [each for each in self._replicas if not each.is_parked]
        change = self._scaler.judge(seconds, sum(each.total_load for each in running), len(running))
        if not change or "change" in self._tasks or self._num_holds:
            return
        making = self._grow(running) if change > 0 else self._shrink(running)
        self._tasks["change"] = asyncio.create_task(making)
        self._tasks["change"].add_done_callback(lambda _: self._tasks.pop("change", None))

    async def _grow(self, running: Sequence[Replica]) -> None:
        """Starts a replica in the state of one that runs."""
        replica = next(each for each in self._replicas if each.is_parked)
        like = min(running, key=lambda each: each.health.state != "healthy")
        log.info("replica %s is started: the others are overloaded", replica.label)
        replica.weights = like.weights
        replica.client.take_state(like.client)
        try:
            await replica.client.suspension.resume()
        except StartupError as error:
            log.error("replica %s cannot be started: %s", replica.label, error.message)
            await replica.client.release()
            return
        if not replica.client.has_state_of(like.client):
            replica.client.restart_like(like.client, "an operator changed the others while it was starting")

    async def _shrink(self, running: Sequence[Replica]) -> None:
        """Has the requests of a replica go on in others, waits for those that cannot, and ends it."""
        replica = min(running, key=lambda each: (each.health.state == "healthy", each.total_load, -each.number))
        log.info("replica %s is stopped: the others can take its load", replica.label)
        async with replica.away():
            while await self._company.ask("holds", replica):
                await asyncio.sleep(TICK_S)
            await replica.client.suspension.suspend()
        await replica.client.release()
