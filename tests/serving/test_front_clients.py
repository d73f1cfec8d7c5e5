"""The clients of an engine that several fronts share: none blames its own requests, or the engine, for what others
do."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from resumable_requests import request
from stepped_host import GRACE_S, TIMEOUT_S, World

from tureen.api_workers import joining
from tureen.api_workers.joining import JoinedClient
from tureen.api_workers.start import SharedClient
from tureen.config import Config
from tureen.contract.types import EngineStats, StepReport
from tureen.errors import StartupError, Unavailable
from tureen.serving import healing
from tureen.serving.crash_bisection import POISON_AFTER
from tureen.serving.healing import TICK_S

CONFIG = Config(watchdog_timeout_s=TIMEOUT_S, freeze_grace_s=GRACE_S)


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)


class FrontWorld(World):
    """The client of a front, over hosts that the test steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.client = JoinedClient("", CONFIG) if kind == "joined" else SharedClient("", CONFIG, "")
        self.client._make_host = self.make_host
        if kind == "owner":
            self.client._open = lambda: healing.HealingClient._open(self.client)  # these hosts have no door


@pytest.mark.parametrize("kind", ["joined", "owner"])
def test_a_request_beside_another_fronts_poison_is_not_called_poison(kind):
    async def scenario():
        world = await FrontWorld(kind).start()
        world.submit(request("innocent"))
        for _ in range(POISON_AFTER):
            await world.turns(2)
            assert not world.tasks["innocent"].done()
            world.host.lose("it was killed")
        await world.settle()
        error = world.answer("innocent")["error"]
        assert isinstance(error, Unavailable)
        assert error.code == "engine_dead"
        assert world.client.health.num_poison == 0
        await world.close()

    asyncio.run(scenario())


def test_both_requests_of_the_owner_go_on_together_after_deaths():
    async def scenario():
        world = await FrontWorld("owner").start()
        world.submit(request("a"), request("b"))
        for _ in range(2):
            await world.turns(2)
            world.host.lose("it was killed")
        await world.finish()
        assert {name: world.answer(name)["error"] for name in "ab"} == {"a": None, "b": None}
        await world.close()

    asyncio.run(scenario())


def test_a_front_without_requests_takes_no_engine_for_hung_that_works_for_others():
    async def scenario():
        world = await FrontWorld("joined").start()
        world.host.receive(StepReport((), msgspec.structs.replace(EngineStats(), num_running=3)))
        look(world)
        assert world.client.health.state == "healthy"
        assert len(world.hosts) == 1
        await world.close()

    asyncio.run(scenario())


def look(world):
    """Twice as long as an engine may take for a step."""
    for _ in range(round(2 * TIMEOUT_S / TICK_S)):
        world.client.look(TICK_S)


@pytest.mark.parametrize("num_asked", [0, 1])
def test_an_engine_that_hangs_on_another_fronts_first_request_is_replaced_by_the_owner(num_asked):
    async def scenario():
        world = await FrontWorld("owner").start()
        world.client.watch_for(lambda: num_asked)
        world.host.receive(StepReport((), EngineStats()))  # it was idle when it spoke last
        look(world)
        assert world.client.health.state == ("replacing" if num_asked else "healthy")
        await world.close()

    asyncio.run(scenario())


def test_a_front_leaves_it_to_the_owner_to_end_an_engine_that_hangs_and_counts_its_death_once():
    async def scenario():
        world = await FrontWorld("joined").start()
        world.submit(request("waits"))
        await world.settle()
        assert world.client.num_asked == 1
        for _ in range(POISON_AFTER - 1):
            look(world)
            assert world.client.health.state == "healthy"
            world.host.lose("it was ended")
            await world.settle()
            assert not world.tasks["waits"].done()
        await world.finish()
        assert world.answer("waits")["error"] is None
        await world.close()

    asyncio.run(scenario())


def test_streams_that_wait_at_a_front_end_when_the_owner_expects_no_engine_and_go_on_with_one_that_comes():
    async def scenario():
        world = await FrontWorld("joined").start()
        world.submit(request("waits"))
        await world.turns(2)
        world.faults.append("slow")
        world.host.lose("it was killed")
        await world.settle()
        assert not world.tasks["waits"].done()
        world.client.expect_none("it cannot be loaded")
        await world.settle()
        error = world.answer("waits")["error"]
        assert isinstance(error, Unavailable)
        assert "it cannot be loaded" in error.message
        assert world.client.failure is not None
        world.host.begin()
        await world.settle()
        world.client.expect_none("what was said before it came")
        assert world.client.failure is None
        world.submit(request("comes"))
        await world.finish()
        assert world.answer("comes")["error"] is None
        await world.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("processes")
def test_a_front_that_finds_no_engine_at_its_start_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(joining, "WAIT_S", 0.01)

    async def scenario():
        client = JoinedClient(str(tmp_path / "door"), CONFIG)
        with pytest.raises(StartupError, match="the engine does not answer within"):
            await client.start()

    asyncio.run(scenario())
