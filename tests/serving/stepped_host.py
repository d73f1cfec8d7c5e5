"""Hosts whose engines are stepped by the test, in its own thread: what happens, happens in the order that it says."""

from __future__ import annotations

import asyncio

from fake_engine import make_engine

from tureen.contract.types import EngineFailed, EngineReady
from tureen.engine.loop import Loop
from tureen.serving.healing import HealingClient
from tureen.serving.watchdog import Sign

TIMEOUT_S, GRACE_S = 20.0, 5.0


class SteppedHost:
    """See Host. A frozen one neither steps nor answers; what it says after its end, `speak` still delivers."""

    def __init__(self, world, epoch, receive, lose):
        self.world = world
        self.epoch = epoch
        self.receive = receive
        self.lose = lose
        self.can_be_killed = world.can_be_killed
        self.is_frozen = self.is_closed = False
        self.inbox = []
        self.unsaid = []
        self.processor_s = 0.0

    async def start(self):
        fault = self.world.faults.pop(0) if self.world.faults else None
        if isinstance(fault, OSError):
            raise fault
        if fault == "ends":
            self.lose("it ended")
        elif fault not in (None, "slow"):
            self.receive(EngineFailed(fault, startup=True))
        elif fault is None:
            self.begin()

    def begin(self):
        """It is ready."""
        self.engine, info = self.world.factory()
        self.loop = Loop(self.engine, lambda _: [], self.unsaid.append)
        self.receive(EngineReady(info))
        asyncio.get_running_loop().call_soon(self.restore)

    def restore(self):
        """Do the calls that bring it to the state of the one before."""
        if self.world.client._is_starting and not self.is_closed:
            self.work()
            asyncio.get_running_loop().call_soon(self.restore)

    def work(self):
        """All that was sent, and no step."""
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            self.loop._handle(message)
        self.speak()

    def send(self, message):
        self.inbox.append(message)

    def sign(self):
        return Sign(not self.is_frozen, self.processor_s, self.is_frozen)

    def turn(self):
        """Take what was sent, and step once. What that brings is said, unless the engine dies in it."""
        assert not self.is_frozen
        assert not self.is_closed
        inbox, self.inbox = self.inbox, []
        try:
            for message in inbox:
                self.loop._handle(message)
            self.loop._turn()
        except Exception as error:  # noqa: BLE001 - as in Loop.run
            self.unsaid.clear()
            self.lose(type(error).__name__)
            return
        self.speak()

    def speak(self):
        said, self.unsaid[:] = list(self.unsaid), []
        for message in said:
            self.receive(message)

    async def close(self, *, at_once):
        self.is_closed = True


class Hosts:
    """The hosts of one client, newest last. Each start takes a fault from `faults` while there is one."""

    def __init__(self, factory=make_engine, *, can_be_killed=True):
        self.factory = factory
        self.can_be_killed = can_be_killed
        self.faults = []
        self.hosts = []

    def make_host(self, epoch, receive, lose):
        self.hosts.append(SteppedHost(self, epoch, receive, lose))
        return self.hosts[-1]

    @property
    def host(self):
        return self.hosts[-1]


class World(Hosts):
    """A client over such hosts."""

    def __init__(self, factory=make_engine, *, can_be_killed=True):
        super().__init__(factory, can_be_killed=can_be_killed)
        self.client = HealingClient(self.make_host, watchdog_timeout_s=TIMEOUT_S, freeze_grace_s=GRACE_S)
        self.deltas = {}
        self.tasks = {}

    async def start(self):
        await self.client.start()
        self.client._tasks.pop("watch").cancel()  # the test looks itself
        return self

    def submit(self, *requests):
        for request in requests:
            self.deltas[request.id] = []
            self.tasks[request.id] = asyncio.create_task(self._follow(request))

    async def _follow(self, request):
        async for delta in self.client.generate(request):
            self.deltas[request.id].append(delta)

    async def settle(self):
        """Let everybody have what is there, and an engine that is being started be ready."""
        for _ in range(60):
            await asyncio.sleep(0)

    async def turns(self, count):
        for _ in range(count):
            await self.settle()
            self.host.turn()
        await self.settle()

    async def finish(self, limit=3000):
        """Turns until nobody waits."""
        await self.settle()
        while self.client._streams.is_busy:
            await self.turns(1)
            limit -= 1
            assert limit, "somebody waits for ever"

    def answer(self, request_id):
        """All that came of a request; the error that ended it, where one did."""
        deltas = self.deltas[request_id]
        task = self.tasks[request_id]
        return {
            "text": "".join(delta.text for delta in deltas),
            "ids": [one for delta in deltas for one in delta.token_ids],
            "logprobs": [one for delta in deltas for one in delta.output_logprobs],
            "prompt": [one for delta in deltas for one in delta.prompt_logprobs],
            "states": [one for delta in deltas for one in delta.hidden_states],
            "explained": [one for delta in deltas for one in delta.explanations],
            "finish": [delta.finish for delta in deltas if delta.finish],
            "usage": deltas[-1].usage if deltas else None,
            "error": task.exception() if task.done() else None,
        }

    async def close(self):
        await self.client.close()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def answers_undisturbed(requests):
    """What one engine answers that nothing happens to, by request id."""

    async def scenario():
        world = await World().start()
        world.submit(*requests)
        await world.finish()
        await world.close()
        return {name: world.answer(name) for name in world.tasks}

    return asyncio.run(scenario())
