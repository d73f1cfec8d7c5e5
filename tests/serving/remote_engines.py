"""Engines behind sockets, a router over them, and what may happen to the network between."""

from __future__ import annotations

import asyncio
import contextlib

from fake_engine import make_request

from tureen.config import Config
from tureen.data_parallel.engine_server import EngineServer
from tureen.data_parallel.handshake import ModelDigests
from tureen.data_parallel.remote import EngineAddress, RemoteClient, RemoteEngine
from tureen.data_parallel.router import Router
from tureen.serving import process
from tureen.serving.child import BuildOrder

DIGESTS = ModelDigests("w" * 16, "t" * 16)
HERE = EngineAddress("127.0.0.1", 0)
GRACE_S = 600.0
TRIES = 30
"""How often streams are begun until each engine has some: one that is held up begins when others have ended theirs."""


class Wire:
    """A relay to an engine, which can be cut, and can hold back what it is given."""

    def __init__(self, target: EngineAddress) -> None:
        self.target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self.is_cut = False
        self._writers = []
        self._tasks = []

    async def start(self) -> Wire:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = EngineAddress(*self._server.sockets[0].getsockname()[:2])
        return self

    async def _take(self, reader, writer) -> None:
        if self.is_cut:
            writer.close()
            return
        others = await asyncio.open_connection(self.target.host, self.target.port)
        self._writers += [writer, others[1]]
        self._tasks += [asyncio.create_task(self._pump(*ends)) for ends in ((reader, others[1]), (others[0], writer))]

    async def _pump(self, reader, writer) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def hold(self) -> None:
        self._flows.clear()

    def let_go(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        self.let_go()
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def start_engine(factory="make_slow_engine", *, context=None, digests=DIGESTS) -> EngineServer:
    """An engine in a process of its own, which listens."""
    order = f"fake_engine:{factory}"

    def make_host(epoch, receive, lose):
        return process.ProcessHost(BuildOrder(order, Config(log_level="error"), epoch), receive, lose)

    server = EngineServer(make_host, digests, Config(watchdog_timeout_s=GRACE_S, freeze_grace_s=GRACE_S))
    await server.listen(HERE, context)
    return server


def pid_of(server: EngineServer) -> int:
    return server.engine._host.pid


def place_of(address: EngineAddress, context=None, digests=DIGESTS) -> RemoteEngine:
    async def find():
        return address

    return RemoteEngine(find, digests, context)


def make_client(place: RemoteEngine):
    return lambda on_turn: RemoteClient(place, on_turn, watchdog_timeout_s=GRACE_S, freeze_grace_s=GRACE_S)


@contextlib.asynccontextmanager
async def served(num_engines=2, factory="make_slow_engine", *, num_fronts=1, through_wires=False):
    """Engines, and routers over all of them. With wires each front has one to each engine, in `wires`."""
    servers = [await start_engine(factory) for _ in range(num_engines)]
    routers, wires = [], []
    try:
        await asyncio.gather(*(server.engine.start() for server in servers))
        for _ in range(num_fronts):
            addresses = [server.address for server in servers]
            if through_wires:
                own = [await Wire(address).start() for address in addresses]
                wires += own
                addresses = [wire.address for wire in own]
            router = Router()
            routers.append(router)
            await router.start([make_client(place_of(address)) for address in addresses])
        yield servers, routers, wires
    finally:
        for router in routers:
            await router.close()
        for wire in wires:
            await wire.close()
        for server in servers:
            await server.close()


class Followed:
    """Streams of a router, each with the ids that came. `begun` is set when each has brought some."""

    def __init__(self, router, count=8, tokens=120, prefix="r") -> None:
        self.ids = {f"{prefix}{i}": [] for i in range(count)}
        self.begun = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._follow(router, make_request(name, "ab" * i + "c", max_new_tokens=tokens)))
            for i, name in enumerate(self.ids)
        ]

    async def _follow(self, router, request) -> None:
        async for delta in router.generate(request):
            self.ids[request.id] += delta.token_ids
            if all(len(ids) > 3 for ids in self.ids.values()):
                self.begun.set()

    async def end(self) -> list[list[int]]:
        await asyncio.gather(*self._tasks)
        return list(self.ids.values())


async def followed_everywhere(router, **how) -> Followed:
    """Streams that have begun and of which each engine has some."""
    for _ in range(TRIES):
        followed = Followed(router, **how)
        await followed.begun.wait()
        if all(replica.load for replica in router.replicas):
            return followed
        await followed.end()
    raise AssertionError("never had each engine some")
