"""Replicas are lost and frozen at chosen moments: every output is that of one engine to which nothing happens."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import resumable_requests
from fake_engine import make_engine
from resumable_requests import request
from stepped_host import answers_undisturbed
from stepped_replicas import Worlds

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.contract.types import GenerateRequest
from tureen.data_parallel.peer_workers import Company
from tureen.data_parallel.replica import Passage, Replica
from tureen.errors import Conflict, NotFound, RequestFailed, Unavailable
from tureen.serving import healing

DEADLINE_MS = 60_000


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)


def requests():
    """One of each kind, and one whose deadlines a move must not miss."""
    return [*resumable_requests.requests(), request("in-time", deadline_ms=DEADLINE_MS, ttft_deadline_ms=DEADLINE_MS)]


@pytest.fixture(scope="module")
def undisturbed():
    """What one engine answers, without a router."""
    return answers_undisturbed(requests())


@pytest.fixture(params=["resumed", "repeated"])
def way(request, monkeypatch):
    """How an engine goes on: behind what was sent, or by making it again."""
    if request.param == "repeated":
        for module in ("tureen.serving.streams", "tureen.data_parallel.router"):
            monkeypatch.setattr(f"{module}.must_repeat", lambda _: True)
    return request.param


async def disturbed(*events, num_replicas=2):
    """The answers when (turn, act on the worlds) has happened, in order."""
    worlds = await Worlds(num_replicas).start()
    worlds.submit(*requests())
    turns = 0
    for turn, act in events:
        await worlds.turns(turn - turns)
        turns = turn
        act(worlds)
    await worlds.finish()
    await worlds.close()
    return {name: worlds.answer(name) for name in worlds.tasks}, worlds


def kill(number):
    return lambda worlds: worlds.places[number].host.lose("it was killed")


def freeze(number):
    def act(worlds):
        worlds.places[number].host.is_frozen = True
        worlds.look(number, 1)

    return act


def thaw(number):
    def act(worlds):
        worlds.places[number].host.is_frozen = False
        worlds.look(number, 1)

    return act


def test_two_replicas_share_the_work_and_answer_as_one_engine_does(undisturbed):
    async def scenario():
        worlds = await Worlds().start()
        worlds.submit(*requests())
        await worlds.turns(2)
        shares = [len(worlds.at(number)) for number in range(2)]
        await worlds.finish()
        loads = [replica.load for replica in worlds.client.replicas]
        num_live = worlds.client.num_live
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks}, shares, loads, num_live

    answers, shares, loads, num_live = asyncio.run(scenario())
    assert answers == undisturbed
    assert min(shares) >= 5
    assert (loads, num_live) == ([0, 0], 0)


def test_progress_of_a_prompt_is_no_output():
    """Until its first token, a request's prompt is work of its replica, and replicas with other weights may take it."""

    async def scenario():
        worlds = await Worlds(1, partial(make_engine, Config(chunked_prefill_size=16))).start()
        worlds.submit(request("long", "a" * 40, tokens=4, reports_progress=True))
        seen = []
        for _ in range(4):
            await worlds.turns(1)
            [replica] = worlds.client.replicas
            [passage] = replica.passages.values()
            seen.append((sum(len(delta.token_ids) for delta in worlds.deltas["long"]), replica.load, passage.hardware))
        await worlds.finish()
        await worlds.close()
        return seen

    before, *_, after = asyncio.run(scenario())
    assert before == (0, 44, [])
    assert after[:2] == (2, 2)
    assert after[2]


@pytest.mark.parametrize("turn", range(16))
@pytest.mark.parametrize("number", [0, 1])
def test_outputs_are_the_same_whenever_a_replica_is_lost(undisturbed, way, number, turn):
    answers, worlds = asyncio.run(disturbed((turn, kill(number))))
    assert answers == undisturbed
    assert [len(place.hosts) for place in worlds.places] == [1 + (number == 0), 1 + (number == 1)]


@pytest.mark.parametrize("turns", [(1, 2, 3), (3, 3, 9), (2, 5, 9)])
def test_outputs_are_the_same_when_one_after_the_other_is_lost(undisturbed, way, turns):
    events = [(turn, kill(count % 2)) for count, turn in enumerate(turns)]
    answers, _ = asyncio.run(disturbed(*events))
    assert answers == undisturbed


def test_outputs_are_the_same_when_both_are_lost_at_once(undisturbed, way):
    answers, worlds = asyncio.run(disturbed((4, kill(0)), (4, kill(1))))
    assert answers == undisturbed
    assert [len(place.hosts) for place in worlds.places] == [2, 2]


def test_what_a_silent_replica_has_goes_on_at_once_and_what_it_says_when_it_thaws_is_not_heard(undisturbed, way):
    async def scenario():
        worlds = await Worlds().start()
        worlds.submit(*requests())
        await worlds.turns(5)
        old = worlds.places[0].host
        old.loop._turn()  # a step whose report is on its way
        assert old.unsaid
        freeze(0)(worlds)
        await worlds.settle()
        assert worlds.at(0) == []
        assert worlds.client.health.state == "healthy"
        await worlds.turns(2)
        kill(1)(worlds)  # what can go on nowhere else waits for the next one there
        thaw(0)(worlds)
        await worlds.settle()
        assert worlds.at(0), "some have come back to it"
        old.speak()
        await worlds.finish()
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks}, worlds

    answers, worlds = asyncio.run(scenario())
    assert answers == undisturbed
    assert [len(place.hosts) for place in worlds.places] == [1, 2]


def test_a_replica_that_comes_back_gets_requests_again():
    async def scenario():
        worlds = await Worlds().start()
        kill(0)(worlds)
        worlds.submit(request("while-away"))
        await worlds.turns(1)
        assert worlds.at(1) == ["while-away"]
        worlds.submit(request("afterwards"))
        await worlds.turns(1)
        assert worlds.at(0) == ["afterwards"]
        await worlds.finish()
        await worlds.close()

    asyncio.run(scenario())


def test_a_request_that_kills_engines_is_ended_and_spares_the_others():
    async def scenario(*more):
        worlds = await Worlds().start()
        worlds.submit(*(request(f"r{i}", "a" * (i + 1), tokens=60) for i in range(7)), *more)
        await worlds.finish()
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks}, worlds

    alone, _ = asyncio.run(scenario())
    answers, worlds = asyncio.run(scenario(request("killer", tokens=500, cache_salt="die")))
    error = answers.pop("killer")["error"]
    assert (type(error), error.code) == (RequestFailed, "poison")
    assert answers == alone
    assert min(len(place.hosts) for place in worlds.places) == 2, "one of them it has killed once only"


def test_an_abort_finds_a_request_wherever_it_is():
    async def scenario():
        worlds = await Worlds().start()
        worlds.submit(*(request(f"r{i}", tokens=500) for i in range(4)))
        await worlds.turns(3)
        worlds.client.abort("r0", "client")
        worlds.client.abort("nobody", "client")
        await worlds.turns(1)
        kill(0)(worlds)
        for name in ("r1", "r2", "r3"):  # some of them are in no replica now
            worlds.client.abort(name, "deadline")
        await worlds.finish(limit=10)
        ends = {name: worlds.answer(name)["finish"] for name in worlds.tasks}
        await worlds.close()
        return ends

    ends = asyncio.run(scenario())
    assert [[(end.type, end.reason) for end in ends[f"r{i}"]] for i in range(4)] == [
        [("abort", "client")],
        *[[("abort", "deadline")]] * 3,
    ]


def test_one_name_is_one_request_whichever_replica_has_it():
    async def scenario():
        worlds = await Worlds().start()
        worlds.submit(request("same", tokens=100))
        await worlds.turns(1)
        with pytest.raises(Exception, match="rid 'same' is in use"):
            await anext(aiter(worlds.client.generate(request("same"))))
        await worlds.close()

    asyncio.run(scenario())


def test_who_closes_a_stream_leaves_nothing_in_any_replica():
    async def scenario():
        worlds = await Worlds().start()
        stream = worlds.client.generate(request("left", tokens=500))
        first = asyncio.create_task(anext(stream))
        await worlds.turns(2)
        await first
        await stream.aclose()
        await worlds.turns(1)
        left = (worlds.client.num_live, [replica.load for replica in worlds.client.replicas])
        running = worlds.client.stats.num_running
        await worlds.close()
        return left, running

    assert asyncio.run(scenario()) == ((0, [0, 0]), 0)


# ---- operators


class Adapting(Worlds):
    """Replicas whose engines note what is called, and refuse once what `refusals` names for their number."""

    def __init__(self, refusals):
        super().__init__()
        self.calls = [[] for _ in self.places]
        for number, place in enumerate(self.places):
            place.factory = lambda number=number: self.make(number, refusals.get(number, {}))

    def make(self, number, refusals):
        engine, info = make_engine()

        def call(op, **args):
            self.calls[number].append((op, args))
            if op in refusals:
                raise refusals.pop(op)
            return {"flush_cache": 3, "weight": [1.0], "pause": 2}.get(
                op, {"new": "/path"} if "adapter" in op else None
            )

        engine.call = call
        return engine, info

    async def ask(self, op, **args):
        """Calls and steps until there is an answer."""
        call = asyncio.create_task(self.client.call(op, **args))
        while not call.done():
            await self.turns(1)
        return await call


def operate(op, refusals=None, **args):
    """The answer, or the error, of an operation on two replicas, and what their engines were called for."""

    async def scenario():
        worlds = await Adapting(refusals or {}).start()
        try:
            answer = await worlds.ask(op, **args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = error
        await worlds.turns(3)
        calls, hosts = [list(own) for own in worlds.calls], [len(place.hosts) for place in worlds.places]
        await worlds.close()
        return answer, calls, hosts

    return asyncio.run(scenario())


def test_an_operation_is_done_on_all_and_numbers_are_summed():
    assert operate("flush_cache")[:2] == (6, [[("flush_cache", {})]] * 2)
    assert operate("resume")[:2] == (None, [[("resume", {})]] * 2)
    answer, calls, _ = operate("weight", name="w")
    assert answer == [1.0]
    assert sum(map(len, calls)) == 1, "all have the same weights"


def test_an_adapter_that_one_replica_cannot_load_is_loaded_on_none_and_the_error_names_it():
    answer, calls, _ = operate("load_adapter", {1: {"load_adapter": NotFound("no such folder")}}, name="new", path="/p")
    assert type(answer) is NotFound
    assert answer.message == "replica 1: no such folder"
    assert [op for op, _ in calls[0]] == ["load_adapter", "unload_adapter"]
    assert [op for op, _ in calls[1]] == ["load_adapter"]


def test_what_all_refuse_is_refused_in_the_words_of_one():
    busy = Conflict("2 requests run", code="busy")
    answer, _, hosts = operate("update_weights", {0: {"update_weights": busy}, 1: {"update_weights": busy}}, name="m")
    assert (type(answer), answer.message, answer.code) == (Conflict, "2 requests run", "busy")
    assert hosts == [1, 1]


def test_a_replica_that_cannot_do_what_the_other_did_is_restarted_in_its_state():
    refusals = {1: {"pause": Unavailable("not now")}}
    answer, calls, hosts = operate("pause", refusals, mode="abort")
    assert answer == 2
    assert hosts == [1, 2]
    assert calls[1][-1] == ("pause", {"mode": "in_place"}), "as the journal of the other says"


def test_a_drained_replica_gets_nothing_and_its_streams_go_on_elsewhere(undisturbed, way):
    async def scenario():
        worlds = await Worlds().start()
        worlds.submit(*requests())
        await worlds.turns(4)
        worlds.client.replicas[0].drain(is_drained=True)
        await worlds.settle()
        assert worlds.at(0) == []
        worlds.submit(request("new"))
        await worlds.turns(1)
        assert worlds.at(0) == []
        worlds.client.replicas[1].drain(is_drained=True)  # nobody is left: they share the work again
        worlds.submit(request("newer"))
        await worlds.finish()
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks if name not in ("new", "newer")}

    assert asyncio.run(scenario()) == undisturbed


def test_restarting_one_after_the_other_is_noticed_by_no_stream(undisturbed, way, monkeypatch):
    monkeypatch.setattr("tureen.data_parallel.replica.TICK_S", 0)

    async def scenario():
        worlds = await Worlds().start()
        worlds.submit(*requests())
        for replica in worlds.client.replicas:
            await worlds.turns(3)
            restart = asyncio.create_task(replica.restart())
            while not restart.done():
                await worlds.turns(1)
        await worlds.finish()
        await worlds.close()
        return {name: worlds.answer(name) for name in worlds.tasks}, worlds

    answers, worlds = asyncio.run(scenario())
    assert answers == undisturbed
    assert [len(place.hosts) for place in worlds.places] == [2, 2]
    assert not any(replica.is_drained for replica in worlds.client.replicas)


def test_overlapping_restarts_leave_a_replica_as_it_was_and_a_drain_meanwhile_holds():
    class Client:
        is_replacing = True

        def restart(self, reason: str) -> None:
            pass

    async def play(*, is_drained: bool) -> bool:
        replicas = []
        replica = Replica(0, lambda: None, Company(replicas, {}))
        replicas.append(replica)
        replica.client = Client()
        restarts = [asyncio.create_task(replica.restart()) for _ in range(2)]
        await asyncio.sleep(0)
        assert replica.is_drained
        replica.drain(is_drained=is_drained)
        assert replica.is_drained
        replica.client.is_replacing = False
        await asyncio.gather(*restarts)
        return replica.is_drained

    assert [asyncio.run(play(is_drained=each)) for each in (False, True)] == [False, True]


def test_a_request_that_moves_has_what_is_left_of_its_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("tureen.data_parallel.replica.time.monotonic", lambda: clock[0])
    request = GenerateRequest(
        id="r", token_ids=(1,), params=SamplingParams(max_new_tokens=4), max_new_tokens=4, seed=1, deadline_ms=10_000
    )
    passage = Passage(request, None, ())
    clock[0] += 9.0
    left = passage.continued(request)
    assert (left.deadline_ms, left.ttft_deadline_ms) == (1000, None)
    clock[0] += 9.0
    assert passage.continued(request).deadline_ms == 1
