"""An engine is lost at a chosen moment, and nobody notices but by the pause. Nothing here waits for a clock."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from byte_tokenizer import EOS
from fake_engine import HIDDEN_SIZE, make_engine
from resumable_requests import request, requests
from stepped_host import GRACE_S, TIMEOUT_S, World

from tureen.contract.types import EngineStats
from tureen.errors import NotFound, RequestFailed, StartupError, Unavailable
from tureen.serving import healing, streams
from tureen.serving.healing import TICK_S


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)


async def run(*, lost_after=(), look=None):
    """What came of each, with the engine lost after so many turns in all, again and again."""
    world = await World().start()
    world.submit(*requests())
    turns = 0
    for count in lost_after:
        await world.turns(count - turns)
        turns = count
        if not world.client._streams.is_busy:
            break
        world.host.lose("it was killed")
    await world.finish()
    await world.close()
    answers = {name: world.answer(name) for name in world.tasks}
    return answers, world


@pytest.fixture(scope="module")
def undisturbed():
    answers, _ = asyncio.run(run())
    assert all(one["error"] is None and len(one["finish"]) == 1 for one in answers.values())
    for name in ("explained", "explained-json"):
        assert [why.token_id for why in answers[name]["explained"]] == answers[name]["ids"]
    return answers


@pytest.fixture(params=["resumed", "repeated"])
def way(request, monkeypatch):
    """How an engine goes on: behind what was sent, or by making it again."""
    if request.param == "repeated":
        monkeypatch.setattr(streams, "must_repeat", lambda _: True)
    return request.param


@pytest.mark.parametrize("turn", range(18))
def test_outputs_are_the_same_whenever_the_engine_is_lost(undisturbed, way, turn):
    answers, world = asyncio.run(run(lost_after=[turn]))
    assert len(world.hosts) == 2
    assert answers == undisturbed


@pytest.mark.parametrize("turns", [(1, 2), (3, 3, 9), (2, 5, 9)])
def test_outputs_are_the_same_when_several_engines_are_lost(undisturbed, way, turns):
    answers, world = asyncio.run(run(lost_after=turns))
    assert len(world.hosts) == len(turns) + 1
    assert answers == undisturbed


def test_the_figures_go_on_and_say_who_waits():
    async def scenario():
        world = await World().start()
        world.submit(*(request(f"r{i}") for i in range(3)))
        await world.turns(5)
        before = world.client.stats
        world.host.lose("it was killed")
        away = world.client.stats
        assert (away.num_running, away.num_queued) == (0, 3)
        assert away.total_output_tokens == before.total_output_tokens > 0
        assert world.client.health.state == "replacing"
        assert world.client.health.reason == "it was killed"
        await world.finish()
        assert world.client.stats.total_output_tokens >= 3 * 14
        health = world.client.health
        assert (health.state, health.num_replacements, health.num_resumed) == ("healthy", 1, 3)
        await world.close()

    asyncio.run(scenario())


# ---- frozen


def look(world, seconds):
    for _ in range(round(seconds / TICK_S)):
        world.client.look(TICK_S)


def test_who_freezes_and_thaws_in_time_goes_on_as_if_nothing_had_been(undisturbed):
    async def scenario():
        world = await World().start()
        world.submit(*requests())
        await world.turns(6)
        world.host.is_frozen = True
        look(world, 2)
        assert world.client.health.state == "suspect"
        assert world.client.health.retry_after_s >= GRACE_S - 2
        look(world, GRACE_S - 3)
        world.host.is_frozen = False
        look(world, TICK_S)
        assert world.client.health.state == "healthy"
        await world.finish()
        await world.close()
        assert len(world.hosts) == 1
        assert {name: world.answer(name) for name in world.tasks} == undisturbed

    asyncio.run(scenario())


def test_who_thaws_after_its_work_has_moved_is_not_heard(undisturbed, way):
    async def scenario():
        world = await World().start()
        world.submit(*requests())
        await world.turns(6)
        old = world.host
        old.loop._turn()  # a step whose report is on its way
        assert old.unsaid
        old.is_frozen = True
        look(world, GRACE_S + 1)
        assert world.client.health.state == "replacing"
        await world.settle()
        assert (old.is_closed, world.host.epoch) == (True, 2)
        old.speak()
        old.lose("it was killed")
        await world.turns(2)
        old.speak()
        await world.finish()
        await world.close()
        assert len(world.hosts) == 2
        assert {name: world.answer(name) for name in world.tasks} == undisturbed

    asyncio.run(scenario())


def test_freezing_blames_nobody_and_hanging_does():
    async def scenario(is_frozen):
        world = await World().start()
        world.submit(request("only", tokens=100))
        for _ in range(2):
            await world.turns(1)
            world.host.is_frozen = is_frozen
            look(world, GRACE_S + 1 if is_frozen else TIMEOUT_S + 1)
            await world.settle()
        await world.turns(1)
        deaths = dict(world.client._streams._trials.deaths)
        await world.close()
        return deaths

    assert asyncio.run(scenario(True)) == {}
    assert asyncio.run(scenario(False)) == {"only": 2}


def test_a_thread_that_hangs_fails_who_waits_and_is_well_again_when_it_goes_on():
    async def scenario():
        world = await World(can_be_killed=False).start()
        world.submit(request("r", tokens=100))
        await world.turns(2)
        look(world, TIMEOUT_S + 1)
        await world.settle()
        assert world.answer("r")["error"].code == "engine_dead"
        assert world.client.health.state == "down"
        assert "in a thread cannot be replaced" in world.client.failure
        with pytest.raises(Unavailable):
            await world.client.call("stats")
        await world.turns(1)
        assert world.client.health.state == "healthy"
        world.submit(request("after"))
        await world.finish()
        assert world.answer("after")["error"] is None
        assert world.client.stats.num_running == 0
        await world.close()

    asyncio.run(scenario())


# ---- who is to blame


def test_a_request_that_kills_engines_is_ended_and_the_others_are_as_if_it_had_not_been(way):
    async def scenario(*more):
        world = await World().start()
        world.submit(*(request(f"r{i}", "a" * (i + 1), tokens=60) for i in range(7)), *more)
        await world.finish()
        await world.close()
        return {name: world.answer(name) for name in world.tasks}, world

    alone, _ = asyncio.run(scenario())
    answers, world = asyncio.run(scenario(request("killer", tokens=500, cache_salt="die")))
    error = answers.pop("killer")["error"]
    assert (type(error), error.code) == (RequestFailed, "poison")
    assert answers == alone
    assert world.client.health.num_poison == 1


# ---- starting again


def test_streams_wait_for_an_engine_that_starts_at_the_third_try(undisturbed, way):
    async def scenario():
        world = await World().start()
        world.submit(*requests())
        await world.turns(4)
        world.faults = ["no memory", "ends"]
        world.host.lose("it was killed")
        await world.finish()
        await world.close()
        assert len(world.hosts) == 4
        assert {name: world.answer(name) for name in world.tasks} == undisturbed

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_ends_the_streams_with_a_reason_and_is_tried_again(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0.5)
    gate = asyncio.Event()
    delays = []

    async def scenario():
        world = await World().start()
        world.submit(request("r", tokens=100))
        await world.turns(2)
        sleep = asyncio.sleep

        async def wait(seconds):
            if not seconds:
                await sleep(0)
                return
            delays.append(seconds)
            if len(delays) > 2:
                await gate.wait()

        monkeypatch.setattr(healing.asyncio, "sleep", wait)
        world.faults = ["no memory", OSError(24, "Too many open files"), "no memory"]
        world.host.lose("it was killed")
        await world.settle()
        error = world.answer("r")["error"]
        assert (type(error), error.code) == (Unavailable, "engine_dead")
        assert "no memory" in error.message
        assert delays == [0.5, 1.0, 2.0]
        health = world.client.health
        assert (health.state, health.reason) == ("down", "no memory")
        assert health.retry_after_s >= 2
        with pytest.raises(Unavailable) as refused:
            await anext(world.client.generate(request("late")))
        assert refused.value.retry_after_s >= 2
        gate.set()
        await world.settle()
        assert world.client.health.state == "healthy"
        world.submit(request("after"))
        await world.finish()
        assert world.answer("after")["error"] is None
        await world.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("has_worked", [True, False])
def test_deaths_of_engines_that_nobody_uses_count_as_failed_starts(has_worked):
    async def scenario():
        world = await World().start()
        for number in range(4):
            if has_worked:
                world.submit(request(f"r{number}", tokens=1))
                await world.finish()
            world.host.lose("it ended")
            assert world.client._starts.num_failures == (0 if has_worked else number + 1)
            await world.settle()
        await world.close()

    asyncio.run(scenario())


def test_an_engine_may_take_its_time_to_start_but_not_stay_stopped_meanwhile():
    async def scenario():
        world = await World().start()
        world.submit(request("r"))
        await world.turns(2)
        world.faults = ["slow", "slow"]
        world.host.lose("it was killed")
        await world.settle()
        look(world, 3 * (TIMEOUT_S + GRACE_S))
        assert (len(world.hosts), world.client.health.state) == (2, "replacing")
        world.host.is_frozen = True
        look(world, GRACE_S + 1)
        await world.settle()
        assert len(world.hosts) == 3
        world.host.begin()
        await world.finish()
        assert world.answer("r")["finish"][0].type == "length"
        await world.close()

    asyncio.run(scenario())


def test_the_first_engine_is_not_tried_again():
    async def scenario():
        world = World()
        world.faults = ["no model"]
        with pytest.raises(StartupError, match="no model"):
            await world.start()
        assert len(world.hosts) == 1

    asyncio.run(scenario())


# ---- who comes, leaves or is aborted meanwhile


def test_who_comes_while_there_is_no_engine_waits_and_who_leaves_is_forgotten():
    async def scenario():
        world = await World().start()
        world.submit(request("leaves", tokens=100), request("aborted", tokens=100))
        await world.turns(3)
        world.host.lose("it was killed")
        world.submit(request("comes"))
        world.tasks["leaves"].cancel()
        world.client.abort("aborted", "why")
        await asyncio.gather(world.tasks["leaves"], return_exceptions=True)
        await world.finish()
        assert [one.request.id for one in world.host.engine._sequences.values()] == []
        assert world.answer("comes")["error"] is None
        (end,) = world.answer("aborted")["finish"]
        assert (end.type, end.reason) == ("abort", "why")
        assert len(world.answer("aborted")["ids"]) == world.answer("aborted")["usage"].output_tokens == 3
        assert world.client._streams._streams == {}
        await world.close()

    asyncio.run(scenario())


def test_a_frozen_engine_does_not_hold_up_an_abort():
    async def scenario():
        world = await World().start()
        world.submit(request("r", tokens=100))
        await world.turns(2)
        world.host.is_frozen = True
        look(world, 2)
        world.client.abort("r", "why")
        await world.settle()
        assert world.answer("r")["finish"][0].reason == "why"
        world.host.is_frozen = False
        look(world, TICK_S)
        await world.turns(2)
        assert world.client.stats.num_running == 0
        await world.close()

    asyncio.run(scenario())


def test_a_deadline_that_passes_in_the_pause_ends_the_request_with_what_it_has(monkeypatch):
    async def scenario():
        world = await World().start()
        world.submit(request("late", tokens=100, deadline_ms=60_000), request("fine", tokens=20))
        await world.turns(3)
        world.host.lose("it was killed")
        arrived_s = world.client._streams._streams["late"].live.arrived_s
        monkeypatch.setattr("tureen.serving.streams.time.monotonic", lambda: arrived_s + 61)
        await world.finish()
        (end,) = world.answer("late")["finish"]
        assert (end.type, end.reason) == ("abort", "deadline")
        assert len(world.answer("late")["ids"]) == 3
        assert world.answer("fine")["finish"][0].type == "length"
        await world.close()

    asyncio.run(scenario())


def test_an_output_that_comes_out_otherwise_ends_with_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(streams, "must_repeat", lambda _: True)

    async def scenario():
        world = await World().start()
        world.submit(request("moody", tokens=20), request("fine", tokens=20))
        await world.turns(5)
        world.host.lose("it was killed")
        await world.settle()
        live_one = world.client._streams._streams["moody"].live
        live_one._repeat._token_ids = (1, 2, 3)
        await world.finish()
        error = world.answer("moody")["error"]
        assert (type(error), error.code) == (RequestFailed, "cannot_resume")
        assert world.answer("fine")["finish"][0].type == "length"
        assert world.client.stats.num_running == 0
        await world.close()

    asyncio.run(scenario())


# ---- control operations


async def call(world, op, **args):
    task = asyncio.create_task(world.client.call(op, **args))
    await world.settle()
    world.host.work()
    return await task


def test_a_replacement_is_in_the_state_that_operators_had_brought_the_engine_to():
    async def scenario():
        world = await World().start()
        await call(world, "update_weights", number=7)
        await call(world, "load_adapter", name="gone", path="/gone")
        await call(world, "load_adapter", name="kept", path="/kept")
        await call(world, "unload_adapter", name="gone")
        await call(world, "pause", mode="retract")
        await call(world, "hold")
        await call(world, "let_go")
        await call(world, "release_memory", tags=["kv_cache"])
        world.submit(request("refused"))
        world.host.lose("it was killed")
        await world.settle()
        assert len(world.hosts) == 2
        engine = world.host.engine
        assert engine.rows._runner._weights == 7
        assert engine.adapters.paths() == {"kept": "/kept"}
        assert (engine.control.is_paused, engine.scheduler.is_held) == (True, False)
        assert engine.control.released == {"kv_cache"}
        await world.turns(1)
        assert world.answer("refused")["error"].code == "memory_released"
        await call(world, "resume_memory", tags=["kv_cache"])
        await call(world, "resume")
        world.host.lose("it was killed")
        await world.settle()
        assert len(world.hosts) == 3
        engine = world.host.engine
        assert (engine.control.is_paused, engine.control.released, engine.rows._runner._weights) == (False, set(), 7)
        await world.close()

    asyncio.run(scenario())


def test_streams_go_on_with_the_weights_that_were_exchanged(way):
    async def scenario(*, is_lost):
        world = await World().start()
        await call(world, "update_weights", number=7)
        world.submit(request("r"))
        await world.turns(5)
        if is_lost:
            world.host.lose("it was killed")
        await world.finish()
        await world.close()
        return world.answer("r")

    assert asyncio.run(scenario(is_lost=True)) == asyncio.run(scenario(is_lost=False))


def test_a_replacement_that_cannot_have_the_weights_ends_the_streams():
    async def scenario():
        world = await World().start()
        world.client._streams.journal.note("update_weights", {"wrong": "argument"}, 0)
        world.submit(request("r", tokens=100))
        await world.turns(3)
        world.host.lose("it was killed")
        for _ in range(20):
            await world.settle()
        error = world.answer("r")["error"]
        assert error.code == "engine_dead"
        assert "cannot be restored to its state" in error.message
        await world.close()

    asyncio.run(scenario())


def test_a_replacement_with_other_files_than_the_server_was_started_with_ends_the_streams():
    def factory():
        engine, info = make_engine()
        made.append(engine)
        return engine, msgspec.structs.replace(info, files=(("model.gguf", 100, len(made)),))

    made = []

    async def scenario():
        world = await World(factory).start()
        world.submit(request("r", tokens=100))
        await world.turns(3)
        world.host.lose("it was killed")
        for _ in range(20):
            await world.settle()
        assert "files have changed" in world.answer("r")["error"].message
        assert world.client.health.state == "down"
        await world.close()

    asyncio.run(scenario())


def test_a_call_is_done_by_the_next_engine_but_not_by_a_third():
    async def scenario():
        world = await World().start()
        calls = [asyncio.create_task(world.client.call(op)) for op in ("stats", "nope")]
        await world.settle()
        world.host.lose("it was killed")
        await world.settle()
        world.host.work()
        assert msgspec.convert(await calls[0], EngineStats).num_pages == 256
        with pytest.raises(NotFound):
            await calls[1]
        unlucky = asyncio.create_task(world.client.call("stats"))
        await world.settle()
        world.faults = ["no memory", "ends"]  # what does not start, does nothing twice
        for _ in range(2):
            world.host.lose("it was killed")
            await world.settle()
        with pytest.raises(Unavailable) as lost:
            await unlucky
        assert lost.value.code == "engine_lost"
        await world.close()

    asyncio.run(scenario())


def test_what_is_compared_here_is_there(undisturbed):
    """The undisturbed run has of everything that could be lost or doubled."""
    assert undisturbed["said"]["text"] == "héllo wörld"
    assert undisturbed["said"]["ids"][-1] == EOS
    assert undisturbed["stop"]["text"] == "one "
    assert undisturbed["held"]["text"] == "one STO and no more"
    assert len(undisturbed["scored"]["logprobs"]) == 14
    assert len(undisturbed["scored"]["prompt"]) == 3
    assert [len(one) for one in undisturbed["all-states"]["states"]] == [4 * HIDDEN_SIZE] * (3 + 13)
    assert len(undisturbed["pooled"]["states"]) == 1
    assert undisturbed["sample-2"]["text"] != undisturbed["seeded"]["text"]


def test_an_engine_without_work_is_not_hung_because_nobody_takes_an_output_that_has_ended():
    async def scenario():
        world = await World().start()
        output = world.client.generate(requests()[0])
        begun = asyncio.ensure_future(anext(output))
        while not begun.done() or world.client.num_live:
            await world.turns(1)
        look(world, 3 * TIMEOUT_S)
        assert world.client.health.state == "healthy"
        await output.aclose()
        await world.close()

    asyncio.run(scenario())
