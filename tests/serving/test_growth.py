"""Replicas come and go with what there is to compute: on a clock that the test steps."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from fake_engine import make_request
from resumable_requests import request
from simulated_processes import play
from stepped_replicas import Worlds
from timeouts import until

from tureen.config import Config
from tureen.data_parallel.pool import GROW_AFTER_S, LOOK_S, LOW_SHARE, SHRINK_AFTER_S, Pool, Scaler
from tureen.data_parallel.router import Router
from tureen.data_parallel.start import first_of, make_client, scaler_of
from tureen.errors import StartupError
from tureen.serving import healing

TARGET = 1000


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)


def judged(loads, *, least=1, most=4):
    """How many replicas there are after each second of these loads, where each change takes no time."""
    scaler, count, counts = Scaler(least, most, TARGET), least, []
    for load in loads:
        count += scaler.judge(1.0, load, count)
        counts.append(count)
    return counts


def test_a_load_that_lasts_brings_one_replica_after_the_other_and_no_more_than_it_needs():
    counts = judged([2500] * 100)
    assert counts[:11] == [1] * 10 + [2]
    assert counts[-1] == 3, "three can have it, 833 each"
    assert judged([10**9] * 200)[-1] == 4, "and no more than are allowed"


def test_a_burst_shorter_than_the_time_brings_none():
    assert set(judged(([5000] * int(GROW_AFTER_S) + [0]) * 10)) == {1}


def test_replicas_go_only_when_fewer_would_have_little_for_long_and_never_below_the_least():
    busy, low = [10**9] * 100, LOW_SHARE * TARGET
    counts = judged([*busy, *[low * 3 - 1] * 2000])
    assert counts[-1] == 3, "three would have less than a quarter each, two would not"
    assert counts.index(3, 99) - 99 >= SHRINK_AFTER_S
    assert judged([*busy, *[low * 3] * 2000])[-1] == 4
    assert judged([*busy, *[0] * 2000])[-1] == 1
    assert judged([*busy, *[0] * 2000], least=2)[-1] == 2


def test_no_load_makes_replicas_come_and_go_for_ever():
    for load in range(0, 6000, 125):
        counts = judged([load] * 5000)
        changes = [a for a, b in itertools.pairwise(counts) if a != b]
        assert len(changes) <= 3, load


class Growing(Worlds):
    """Three replicas, of which one is started; the test looks at the load itself."""

    async def start(self):
        await self.client.start([place.make_client for place in self.places], num_first=1)
        for place in self.places:
            place.client._tasks.pop("watch").cancel()
        self.pool = Pool(self.client.replicas, Scaler(1, 3, 100), self.client.company)
        return self

    async def pass_time(self, seconds):
        for _ in range(round(seconds / LOOK_S)):
            self.pool.look(LOOK_S)
            await self.turns(1)

    @property
    def states(self):
        return [replica.health.state for replica in self.client.replicas]

    async def close(self):
        await self.pool.close()
        await super().close()


def test_outputs_are_the_same_while_replicas_come_and_go(monkeypatch):
    monkeypatch.setattr("tureen.data_parallel.pool.TICK_S", 0)
    asked = [request(f"r{i}", "ab" * i + "c", tokens=120, seed=i, temperature=0.8) for i in range(8)]

    async def scenario(*, grows):
        worlds = Growing(3)
        await worlds.start()
        assert worlds.states == ["healthy", "unloaded", "unloaded"]
        worlds.submit(*asked)
        seen = [0]
        if grows:
            await worlds.pass_time(GROW_AFTER_S + 5)
            assert worlds.states == ["healthy", "healthy", "unloaded"]
            worlds.submit(request("new"))
            await worlds.turns(1)
            assert worlds.at(1) == ["new"], "it gets what comes"
            await worlds.pass_time(GROW_AFTER_S + 5)
            assert worlds.states == ["healthy"] * 3
            worlds.pool._scaler = Scaler(1, 3, 10**9)  # nothing is much any more
            worlds.client.replicas[1].num_given = 0
            await worlds.pass_time(SHRINK_AFTER_S / 10)
            worlds.pool._scaler._low_s = SHRINK_AFTER_S
            await worlds.pass_time(5)
            seen.append(worlds.states.count("unloaded"))
        await worlds.finish()
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks if name != "new"}, seen

    undisturbed, _ = asyncio.run(scenario(grows=False))
    answers, seen = asyncio.run(scenario(grows=True))
    assert answers == undisturbed
    assert seen[-1] == 1


def test_what_operators_do_reaches_a_replica_that_comes_later(monkeypatch):
    monkeypatch.setattr("tureen.data_parallel.pool.TICK_S", 0)

    async def scenario():
        worlds = Growing(2)
        await worlds.start()
        paused = asyncio.create_task(worlds.client.call("pause", mode="in_place"))
        while not paused.done():
            await worlds.turns(1)
        worlds.submit(*(request(f"r{i}", tokens=100) for i in range(4)))
        await worlds.pass_time(GROW_AFTER_S + 5)
        assert worlds.states == ["healthy"] * 2
        assert worlds.places[1].host.engine.stats(0.0).is_paused
        await worlds.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_growing", [False, True], ids=["before the load", "while one is started"])
def test_weights_are_exchanged_in_all_replicas_that_there_are_then(monkeypatch, is_growing):
    for module in ("pool", "rolling"):
        monkeypatch.setattr(f"tureen.data_parallel.{module}.TICK_S", 0)

    async def scenario():
        worlds = Growing(3)
        await worlds.start()
        worlds.client._pool = worlds.pool
        worlds.pool._scaler = Scaler(2, 3, 100)
        await worlds.pass_time(3)
        assert worlds.states == ["healthy", "healthy", "unloaded"]
        worlds.submit(*(request(f"r{i}", tokens=100) for i in range(4)))
        if is_growing:
            worlds.pool.look(GROW_AFTER_S + 1)
        rolled = asyncio.create_task(worlds.client.call("roll_weights", version=None, number=7))
        await asyncio.sleep(0)
        while not rolled.done():
            worlds.pool.look(GROW_AFTER_S + 1)
            await worlds.turns(1)
        await rolled
        await worlds.pass_time(GROW_AFTER_S + 5)
        worlds.submit(*(request(f"late{i}", tokens=5) for i in range(6)))
        await worlds.finish()
        running = [place for place, state in zip(worlds.places, worlds.states, strict=True) if state == "healthy"]
        weights = {place.host.engine.rows._runner._weights for place in running}
        numbers = {replica.weights for replica in worlds.client.replicas if not replica.is_parked}
        await worlds.close()
        return weights, numbers

    weights, numbers = asyncio.run(scenario())
    assert weights == {7}
    assert len(numbers) == 1


def test_a_replica_that_cannot_be_started_is_tried_again_later():
    async def scenario():
        worlds = Growing(2)
        await worlds.start()
        worlds.places[1].faults.append("no room")
        worlds.submit(*(request(f"r{i}", tokens=500) for i in range(4)))
        await worlds.pass_time(GROW_AFTER_S + 5)
        assert worlds.states == ["healthy", "unloaded"]
        await worlds.pass_time(GROW_AFTER_S + 5)
        assert worlds.states == ["healthy", "healthy"]
        await worlds.close()

    asyncio.run(scenario())


def test_processes_come_under_load_and_go_without_it(monkeypatch, processes):
    monkeypatch.setattr("tureen.data_parallel.pool.GROW_AFTER_S", 0)
    monkeypatch.setattr("tureen.data_parallel.pool.SHRINK_AFTER_S", 0)
    monkeypatch.setattr("tureen.data_parallel.pool.LOOK_S", 0.01)

    async def scenario():
        router, config = Router(), Config(log_level="error")
        clients = [lambda on_turn: make_client(config, "fake_engine:make_slow_engine", on_turn)] * 2
        await router.start(clients, num_first=1, scaler=Scaler(1, 2, 100))
        states = lambda: [replica.health.state for replica in router.replicas]  # noqa: E731
        ids = []

        async def follow():
            async for delta in router.generate(make_request("long", max_new_tokens=1900)):
                ids.extend(delta.token_ids)

        async def grown():
            """A stream under which there came one more. A process may take longer to start than a stream."""
            while True:
                alone = asyncio.create_task(follow())
                await until(lambda alone=alone: alone.done() or states() == ["healthy", "healthy"], "one more")
                if not alone.done():
                    return alone
                ids.clear()

        alone = await grown()
        pid = router.replicas[1].client._host.pid
        await alone
        await until(lambda: states().count("unloaded") == 1, "one less")
        if states()[1] == "unloaded":
            await until(lambda: not processes.is_alive(pid), "its process has ended")
        before, ids[:] = list(ids), []
        await follow()
        assert ids == before
        await router.close()

    play(scenario)


def test_bounds_that_contradict_each_other_are_refused():
    assert first_of(Config(replicas=2)) == 2
    assert scaler_of(Config(replicas=2)) is None
    assert first_of(Config(min_replicas=2, max_replicas=4)) == 2
    assert scaler_of(Config(max_replicas=4)) is not None
    for wrong in ({"replicas": 5, "max_replicas": 4}, {"min_replicas": 3}, {"min_replicas": 5, "max_replicas": 4}):
        with pytest.raises(StartupError, match=r"--replicas \d, --min-replicas \d, --max-replicas \d: must not"):
            first_of(Config(**wrong))
    with pytest.raises(StartupError, match="with addresses"):
        first_of(Config(replicas="tcp://127.0.0.1:7000", max_replicas=2))
