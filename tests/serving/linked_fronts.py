"""Routers of two fronts over the same engines, linked as a server's processes are, and their streams."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from remote_engines import TRIES, Followed
from timeouts import until

from tureen.data_parallel.router import Router


class Link:
    """What the owner's process and the other front's say to each other, without processes."""

    def __init__(self, owner: Router, other: Router) -> None:
        self.owner, self.other = owner, other
        self.told = []  # each list of facts, once
        owner.company.others = self

    @property
    def facts(self):
        return [replica.facts for replica in self.owner.replicas]

    async def tell(self) -> None:
        if self.told[-1:] != [self.facts]:
            self.told.append(self.facts)
            self.other.follow(msgspec.convert(msgspec.to_builtins(self.facts), list[type(self.facts[0])]))

    async def any_says(self, question, number) -> bool:
        return self.other.company.says(question, number)

    async def follow(self) -> None:
        """What the owner's process does every half second."""
        while True:
            await self.tell()
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def linked(owner, other):
    link = Link(owner, other)
    following_task = asyncio.create_task(link.follow())
    try:
        yield link
    finally:
        following_task.cancel()


@contextlib.asynccontextmanager
async def joined(owner, clients):
    """The owner's router, which has started, and that of another front, which has clients of its own."""
    other = Router()
    try:
        await other.join(clients, [replica.facts for replica in owner.replicas])
        await until(lambda: all_well(other))
        async with linked(owner, other) as link:
            yield link
    finally:
        await other.close()


def all_well(router) -> bool:
    return all(replica.health.state == "healthy" for replica in router.replicas if not replica.is_parked)


class Streams:
    """Four streams of each front."""

    def __init__(self, link, tokens=120, prefix="x") -> None:
        self.of = [Followed(router, count=4, prefix=prefix, tokens=tokens) for router in (link.owner, link.other)]

    async def begun(self) -> None:
        for followed in self.of:
            await followed.begun.wait()

    async def end(self):
        return [ids for followed in self.of for ids in await followed.end()]


async def streams_everywhere(link, **how) -> Streams:
    """Streams of both fronts that have begun and of which each engine has some of either."""
    for _ in range(TRIES):
        streams = Streams(link, **how)
        await streams.begun()
        if all(replica.num_live for router in (link.owner, link.other) for replica in router.replicas):
            return streams
        await streams.end()
    raise AssertionError("never had each engine some of both fronts")
