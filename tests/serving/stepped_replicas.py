"""Several replicas whose engines are stepped by the test, in its own thread: see stepped_host."""

from __future__ import annotations

import asyncio

from fake_engine import make_engine
from stepped_host import GRACE_S, TIMEOUT_S, Hosts, World

from tureen.data_parallel.replica import ReplicaClient
from tureen.data_parallel.router import Router
from tureen.serving.healing import TICK_S


class Place(Hosts):
    """The hosts of one replica."""

    def make_client(self, on_turn):
        self.client = ReplicaClient(self.make_host, on_turn, watchdog_timeout_s=TIMEOUT_S, freeze_grace_s=GRACE_S)
        return self.client


class Worlds(World):
    """A router over such replicas. `places` are theirs, by number."""

    def __init__(self, num_replicas=2, factory=make_engine):
        self.places = [Place(factory) for _ in range(num_replicas)]
        self.client = Router()
        self.deltas = {}
        self.tasks = {}

    async def start(self):
        await self.client.start([place.make_client for place in self.places])
        for place in self.places:
            place.client._tasks.pop("watch").cancel()  # the test looks itself
        return self

    def at(self, number):
        """The ids of the requests that a replica has."""
        return sorted(passage.live.request.id for passage in self.client.replicas[number].passages.values())

    def look(self, number, seconds):
        for _ in range(round(seconds / TICK_S)):
            self.places[number].client.look(TICK_S)

    async def turns(self, count):
        """Steps every engine that can."""
        for _ in range(count):
            await self.settle()
            for place in self.places:
                if not place.hosts:
                    continue
                if not place.host.is_frozen and not place.host.is_closed and hasattr(place.host, "loop"):
                    place.host.turn()
        await self.settle()

    async def finish(self, limit=3000):
        await self.settle()
        while not all(task.done() for task in self.tasks.values()):
            await self.turns(1)
            limit -= 1
            assert limit, "somebody waits for ever"

    async def close(self):
        await self.client.close()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
