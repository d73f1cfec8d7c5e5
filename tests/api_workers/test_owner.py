"""The owner's side of other fronts, whose processes the test plays: what they know, what they leave, and who answers
while one is not there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from app_under_test import ThreadedApp
from timeouts import until

from tureen.api_workers import owner
from tureen.api_workers.owner import Fronts
from tureen.api_workers.wire import Answer, Ask, Figures, Order, Wire
from tureen.data_parallel.peer_workers import Company
from tureen.data_parallel.prefix_index import PrefixIndex
from tureen.errors import StartupError
from tureen.log import LOGGER_NAME

UP = Answer(0, msgspec.to_builtins(Figures(0)))


class PlayedProcess:
    """The process of a front, and the test in its place."""

    pid = 1

    def __init__(self, pass_fds) -> None:
        self.socket = socket.socket(fileno=os.dup(pass_fds[0]))
        self.has_ended = threading.Event()
        self._wire: Wire | None = None

    def kill(self) -> None:
        if not self.has_ended.is_set():
            self.socket.shutdown(socket.SHUT_RDWR)
            self.has_ended.set()

    def wait(self, timeout=None) -> int:
        self.has_ended.wait(timeout)
        return -9

    async def order(self) -> Order:
        self._wire = Wire(*await asyncio.open_connection(sock=self.socket))
        return await self._wire.receive()

    def say(self, message: Answer) -> None:
        self._wire.send(message)

    async def asked(self) -> Ask:
        return await self._wire.receive()

    def close(self) -> None:
        self.kill()
        if self._wire is None:
            self.socket.close()
        else:
            self._wire.close()


class PlayedServer:
    """The owner's server, which notes whose connections it accepts."""

    def __init__(self) -> None:
        self.covered: list[socket.socket] = []
        self.faults: list[OSError] = []

    async def cover(self, listener: socket.socket) -> None:
        if self.faults:
            raise self.faults.pop()
        self.covered.append(listener)

    async def uncover(self, listener: socket.socket) -> None:
        self.covered.remove(listener)


@pytest.fixture
def faults() -> list[OSError]:
    """What keeps processes from being started, the next one first."""
    return []


@pytest.fixture
def play(monkeypatch, tmp_path, faults):
    """A function that runs a scenario with the application, the owner's view of its other fronts, of which there is one
    unless it says otherwise, and their processes."""
    started: list[PlayedProcess] = []

    def start(command, pass_fds, env):
        if faults:
            raise faults.pop(0)
        started.append(PlayedProcess(pass_fds))
        return started[-1]

    monkeypatch.setattr(owner.subprocess, "Popen", start)
    monkeypatch.setattr(owner, "FIRST_DELAY_S", 0)
    monkeypatch.setattr(owner, "LOOK_S", 0.001)

    async def run(app, scenario, num_others):
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(socket.socket()) for _ in range(num_others)]
            fronts = Fronts(app.config, tmp_path, listeners, app.app)
            opening = asyncio.create_task(fronts.open())
            try:
                await until(lambda: len(started) == num_others or opening.done())
                await scenario(app.state, fronts, started, opening)
            finally:
                for process in started:
                    process.close()
                await fronts.close()
                await asyncio.gather(opening, return_exceptions=True)

    def play(scenario, num_others=1, **settings):
        with ThreadedApp(**settings) as app:
            app.run(run(app, scenario, num_others))

    return play


def test_a_front_that_replaces_another_is_told_the_facts_of_now(play):
    async def scenario(state, fronts, started, opening):
        first = await started[0].order()
        assert (first.facts.adapters, first.facts.weight_version) == ({}, "default")
        started[0].say(UP)
        await opening
        started[0].kill()
        state.adapters = {"late": "path"}
        state.serve_weights(version="step-2")
        await until(lambda: len(started) == 2)
        second = await started[1].order()
        assert (second.facts.adapters, second.facts.weight_version) == ({"late": "path"}, "step-2")

    play(scenario)


def test_a_server_whose_front_cannot_be_started_does_not_start_and_says_why(play, faults):
    faults.append(OSError(11, "Resource temporarily unavailable"))

    async def scenario(state, fronts, started, opening):
        with pytest.raises(StartupError, match="Resource temporarily unavailable"):
            await opening
        assert not started

    play(scenario)


def test_a_replacement_that_cannot_be_started_is_tried_again(play, faults):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        faults.append(OSError(12, "Cannot allocate memory"))
        started[0].kill()
        await until(lambda: len(started) == 2)
        await started[1].order()
        started[1].say(UP)
        await until(lambda: fronts._all[0].is_up)
        assert not faults

    play(scenario)


def test_connections_for_a_front_that_is_not_there_are_the_owners_until_it_is(play, faults):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        server = PlayedServer()
        server.faults.append(OSError(24, "Too many open files"))
        fronts.share_with(server)
        started[0].kill()
        await until(lambda: server.covered)
        await until(lambda: len(started) == 2)
        await started[1].order()
        assert len(server.covered) == 1
        started[1].say(UP)
        await until(lambda: not server.covered)

    play(scenario)


def test_connections_for_a_front_that_does_not_get_to_run_are_the_owners_until_it_speaks(play, monkeypatch):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        server = PlayedServer()
        fronts.share_with(server)
        monkeypatch.setattr(owner, "SILENT_S", -1.0)  # as if it had said nothing for long
        await until(lambda: server.covered)
        monkeypatch.setattr(owner, "SILENT_S", 1000.0)
        started[0].say(UP)
        await until(lambda: not server.covered)
        assert len(started) == 1

    play(scenario)


def test_the_owner_knows_what_the_engine_has_of_fronts_that_speak_and_of_no_others(play, monkeypatch):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        started[0].say(Answer(0, msgspec.to_builtins(Figures(3, [], 2))))
        await until(lambda: fronts.num_asked == 2)
        monkeypatch.setattr(owner, "SILENT_S", -1.0)
        assert fronts.num_asked == 0

    play(scenario)


def test_each_front_hears_what_all_others_have_given_to_each_replica_and_it_hears_it_once(play):
    replicas = [SimpleNamespace(load=load, load_elsewhere=0) for load in (5, 7)]
    router = SimpleNamespace(replicas=replicas, company=Company(replicas, {}))
    router.company.prefixes = PrefixIndex(2, 16, 100)
    router.company.prefixes.share()

    async def heard(process) -> list:
        """The next that it is asked and that has news in it."""
        while True:
            asked = await process.asked()
            process.say(Answer(asked.number, True))
            if asked.op == "others" and any(any(pages) for news in asked.args["news"] for pages in news):
                return [asked.args["loads"], [news for news in asked.args["news"] if any(news)]]

    async def scenario(state, fronts, started, opening):
        for process in started:
            await process.order()
            process.say(UP)
        await opening
        router.company.prefixes.give(0, [1, 2])
        first = Figures(0, loads=[10, 0], news=[[], [4, 3]])
        started[0].say(Answer(0, msgspec.to_builtins(first)))
        await until(lambda: fronts._all[0].news)
        looking = asyncio.create_task(fronts._look_at_replicas(router))
        assert await heard(started[0]) == [[5, 7], [[[2, 1], []]]]
        assert await heard(started[1]) == [[15, 7], [[[2, 1], []], [[], [4, 3]]]]
        assert router.company.prefixes.num_known([1, 2]) == [2, 0]
        assert router.company.prefixes.num_known([3, 4]) == [0, 2]
        assert [replica.load_elsewhere for replica in replicas] == [10, 0]
        router.company.prefixes.give(1, [9])
        assert (await heard(started[1]))[1] == [[[], [9]]]
        looking.cancel()

    play(scenario, num_others=2)


def test_what_a_front_said_before_it_heard_of_the_end_does_not_say_that_nothing_runs_there(play):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        fronts.drain()
        started[0].say(Answer(0, msgspec.to_builtins(Figures(0, [("said", {}, 1.0)]))))
        await until(lambda: fronts._all[0].figures.samples)
        assert fronts.num_running
        asked = await started[0].asked()
        started[0].say(Answer(asked.number, True))
        await until(lambda: not fronts.num_running)

    play(scenario)


def test_a_front_that_starts_is_told_what_has_changed_before_it_serves(play):
    async def scenario(state, fronts, started, opening):
        order = await started[0].order()
        assert order.facts.weight_version == "default"
        state.serve_weights(version="step-2")
        telling = asyncio.create_task(fronts.tell())
        asked = await started[0].asked()
        assert (asked.number, asked.op, asked.args["facts"]["weight_version"]) == (0, "facts", "step-2")
        await telling  # nobody waits for a front that does not serve yet
        started[0].say(UP)
        await opening

    play(scenario)


def test_a_front_that_starts_while_the_server_drains_is_told_before_it_serves_and_not_replaced(play):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        fronts.drain()
        asked = await started[0].asked()
        assert (asked.number, asked.op) == (0, "drain")
        assert not fronts.num_running  # nobody waits for one that does not serve
        started[0].say(UP)
        await opening
        started[0].kill()
        await fronts._tasks[0]
        assert len(started) == 1

    play(scenario)


def test_a_front_that_stays_silent_for_longer_than_the_grace_is_replaced(play, monkeypatch):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        fronts.share_with(PlayedServer())
        monkeypatch.setattr(owner, "SILENT_S", -1.0)  # as if it had said nothing for long
        await until(lambda: len(started) == 2)
        assert started[0].has_ended.is_set()

    play(scenario, freeze_grace_s=0.0)


def test_the_time_in_which_the_owner_itself_stood_still_is_nobodys_silence(play, monkeypatch):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        clock = [0.0]
        monkeypatch.setattr(owner, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        fronts._all[0].heard_s = 0.0
        fronts.share_with(PlayedServer())
        await until(lambda: len(fronts._tasks) == 2)
        clock[0] = 1000.0
        await until(lambda: fronts._all[0].is_covered)
        assert fronts._all[0].silent_s <= 2 * owner.LOOK_S
        assert not started[0].has_ended.is_set()

    play(scenario, freeze_grace_s=5.0)


def test_a_front_that_does_not_say_that_it_was_told_is_replaced_by_one_that_knows(play, monkeypatch):
    monkeypatch.setattr(owner, "ASK_TIMEOUT_S", 0.01)

    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        state.serve_weights(version="step-2")
        await fronts.tell()
        assert (await started[0].asked()).op == "facts"
        await until(lambda: len(started) == 2)
        assert started[0].has_ended.is_set()
        assert (await started[1].order()).facts.weight_version == "step-2"

    play(scenario)


def test_fronts_are_told_that_the_engine_is_not_to_be_expected(play):
    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        fronts.share_with(PlayedServer())
        await state.client.close()
        asked = await started[0].asked()
        assert (asked.op, asked.args) == ("down", {"reason": state.client.failure})

    play(scenario)


def test_a_level_of_logging_that_an_operator_sets_is_set_in_all_fronts(play):
    logger = logging.getLogger(LOGGER_NAME)
    before = logger.level

    async def scenario(state, fronts, started, opening):
        await started[0].order()
        started[0].say(UP)
        await opening
        async with httpx.AsyncClient(transport=httpx.ASGITransport(fronts), base_url="http://127.0.0.1") as http:
            answering = asyncio.create_task(http.post("/configure_logging", json={"log_level": "error"}))
            asked = await started[0].asked()
            assert asked.args["facts"]["log_level"] == logging.ERROR
            assert not answering.done()  # the operator hears of it when all do it
            started[0].say(Answer(asked.number, True))
            assert (await answering).status_code == 200

    try:
        play(scenario)
    finally:
        logger.setLevel(before)
