"""Replicas get other weights one after the other: no output is a mixture, none fails, and each names its weights."""

from __future__ import annotations

import asyncio

import pytest
import resumable_requests
from resumable_requests import request
from stepped_host import World
from stepped_replicas import Worlds

from tureen.data_parallel import rolling
from tureen.errors import Conflict, InvalidRequest
from tureen.serving import healing

NEW = 7
LATE_TURNS = (1, 3, 6, 10, 15)


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)
    monkeypatch.setattr(rolling, "TICK_S", 0)


def late(turn):
    """A request that comes in that turn."""
    return request(f"late-{turn}", "while it rolls", tokens=30)


@pytest.fixture(scope="module")
def answers():
    """What one engine answers to each request: with the old weights, and with the new ones."""

    async def scenario(number):
        world = await World().start()
        world.host.engine.call("update_weights", number=number)
        world.submit(*resumable_requests.requests(), *map(late, LATE_TURNS))
        await world.finish()
        await world.close()
        return {name: world.answer(name) for name in world.tasks}

    return asyncio.run(scenario(0)), asyncio.run(scenario(NEW))


class Rolling(Worlds):
    """Replicas that are given other weights, and what each request is told of them."""

    def __init__(self, num_replicas=2):
        super().__init__(num_replicas)
        self.versions = {}
        self.roll = None

    async def _follow(self, request):
        def watch(num_tokens, *, weight_version=None, **_):
            self.versions.setdefault(request.id, set()).add(weight_version or self.version)

        async for delta in self.client.generate(request, 1, watch):
            self.deltas[request.id].append(delta)

    version = "old"

    def begin(self):
        async def exchange():
            await self.client.call("roll_weights", version="new", number=NEW)
            self.version = "new"

        self.roll = asyncio.create_task(exchange())

    async def until_rolled(self, limit=3000):
        while not self.roll.done():
            await self.turns(1)
            limit -= 1
            assert limit, "it rolls for ever"


async def rolled(num_replicas, *events):
    """The answers of requests that run while the weights are exchanged, and of some that come meanwhile."""
    worlds = await Rolling(num_replicas).start()
    worlds.submit(*resumable_requests.requests())
    await worlds.turns(2)
    worlds.begin()
    for turn in range(max(LATE_TURNS) + 1):
        if turn in LATE_TURNS:
            worlds.submit(late(turn))
        for when, act in events:
            if when == turn:
                act(worlds)
        await worlds.turns(1)
    await worlds.until_rolled()
    await worlds.roll
    await worlds.finish()
    weights = [place.host.engine.rows._runner._weights for place in worlds.places]
    await worlds.close()
    return {name: worlds.answer(name) for name in worlds.tasks}, worlds.versions, weights


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_an_output_is_wholly_that_of_the_weights_that_it_names(answers, num_replicas):
    old, new = answers
    outputs, versions, weights = asyncio.run(rolled(num_replicas))
    assert weights == [NEW] * num_replicas
    for name, output in outputs.items():
        (version,) = versions[name]
        assert output == {"old": old, "new": new}[version][name], name
    assert {name for name, told in versions.items() if told == {"new"}} & {f"late-{turn}" for turn in LATE_TURNS}


def kill(number):
    return lambda worlds: worlds.places[number].host.lose("it was killed")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("turn", [0, 2, 4, 7, 12])
def test_so_it_is_when_a_replica_is_lost_meanwhile(answers, number, turn):
    old, new = answers
    outputs, versions, weights = asyncio.run(rolled(2, (turn, kill(number))))
    assert weights == [NEW] * 2
    for name in old:
        assert outputs[name] in (old[name], new[name]), name
        assert versions[name] == {"old" if outputs[name] == old[name] else "new"}, name


def refusing(number, fault):
    """Has a replica's engine refuse the weights, as long as it lives."""

    def act(worlds):
        engine = worlds.places[number].host.engine
        call = engine.call

        def refuse(op, **args):
            if op == "update_weights":
                raise fault
            return call(op, **args)

        engine.call = refuse

    return act


def test_weights_that_the_first_replica_cannot_have_change_nothing(answers):
    async def scenario():
        worlds = await Rolling().start()
        refusing(0, InvalidRequest("no such model"))(worlds)
        worlds.submit(*resumable_requests.requests())
        await worlds.turns(2)
        worlds.begin()
        await worlds.until_rolled()
        with pytest.raises(InvalidRequest, match="no such model"):
            await worlds.roll
        await worlds.finish()
        weights = [place.host.engine.rows._runner._weights for place in worlds.places]
        is_drained = [replica.is_drained for replica in worlds.client.replicas]
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks}, weights, is_drained

    outputs, weights, is_drained = asyncio.run(scenario())
    assert outputs == {name: answers[0][name] for name in outputs}
    assert weights == [0, 0]
    assert is_drained == [False, False]


def test_a_later_replica_that_cannot_have_them_gets_them_by_a_restart():
    async def scenario():
        worlds = await Rolling().start()
        refusing(1, InvalidRequest("no memory"))(worlds)
        worlds.begin()
        await worlds.until_rolled()
        await worlds.roll
        await worlds.turns(3)
        weights = [place.host.engine.rows._runner._weights for place in worlds.places]
        hosts = [len(place.hosts) for place in worlds.places]
        await worlds.close()
        return weights, hosts

    assert asyncio.run(scenario()) == ([NEW, NEW], [1, 2])


def test_without_a_replica_that_answers_meanwhile_nothing_is_begun():
    async def scenario():
        worlds = await Rolling().start()
        worlds.client.replicas[1].drain(is_drained=True)
        worlds.begin()
        with pytest.raises(Conflict, match="two active replicas"):
            await worlds.roll
        await worlds.close()

    asyncio.run(scenario())
