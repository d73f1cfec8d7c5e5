"""The owner's side of several fronts: starts the others, replaces one that dies, asks them, and answers what they pass
on. While one is not there, the owner takes its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from tureen.api_workers.proxy import answer_passed
from tureen.api_workers.start import OWNER
from tureen.api_workers.totals import Totals, added
from tureen.api_workers.wire import Answer, Ask, Figures, Order, Sample, SharedFacts, Unable, Wire
from tureen.config import Config
from tureen.errors import StartupError
from tureen.log import LOGGER_NAME, get_logger
from tureen.metrics import Metrics
from tureen.requests.other_fronts import Accepting
from tureen.requests.state import ServerState
from tureen.sandbox import child_process

if TYPE_CHECKING:
    from tureen.data_parallel.router import Router

END_TIMEOUT_S = 8.0
"""Seconds in which a front must have closed its connections and ended."""

ASK_TIMEOUT_S = 10.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 10.0
"""Seconds after which a front that ends is replaced at once."""

LOOK_S = 0.5
"""Seconds between two looks at whether the others are there."""

MOST_REPORTS = 8  # reports of a front that wait to be passed on; of more the last

SILENT_S = 3.0
"""Seconds without a word after which the owner takes a front's connections; it should speak each second."""

REAL = "tureen.api_workers.worker:model_of"

log = get_logger("fronts")


class FrontProcess:
    """Another front: its process, and what it said last."""

    def __init__(self, order: Order, listener: socket.socket) -> None:
        self.order = order
        self.listener = listener
        self.figures = Figures(0)
        self.news: deque[list[list[int]]] = deque(maxlen=MOST_REPORTS)  # that the other fronts are to hear
        self.is_up = False
        self.is_covered = False  # the owner takes its connections
        self.heard_s = 0.0  # when it spoke last, by the monotonic clock
        self.silent_s = 0.0  # seconds for which it has been away, as far as the owner itself ran
        self.num_replacements = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire | None = None
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.is_ready: asyncio.Future[None]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self, facts: Callable[[], SharedFacts]) -> None:
        """Starts the process, and listens to it until it ends. `is_ready` is done when it serves, or cannot.

        facts: tells what is to be known when the process begins; later changes are for `tell`.
        """
        self.is_ready = asyncio.get_running_loop().create_future()
        try:
            process, wire = await self._begin()
        except OSError as error:
            self.is_ready.set_exception(StartupError(f"a front cannot be started: {error.strerror or error}"))
            return
        self._process, self._wire = process, wire
        wire.send(msgspec.structs.replace(self.order, facts=facts()))
        try:
            while (message := await wire.receive()) is not None:
                self._hear(message)
        finally:
            self.is_up = False
            wire.close()
            await self._bury(process)

    async def _begin(self) -> tuple[subprocess.Popen[bytes], Wire]:
        """Starts the process. Returns it, and the connection to it. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), self.listener.fileno()]
            try:
                process = child_process.start("tureen.api_workers.worker", *map(str, descriptors), pass_fds=descriptors)
            except OSError:
                ours.close()
                raise
        return process, Wire(*await asyncio.open_connection(sock=ours))

    def ask(self, op: str, **args: Any) -> asyncio.Future[Any]:
        """Has it do something. The future has its answer; None when it is gone before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._wire is None or not self.is_up:
            future.set_result(None)
            return future
        self._num_asked += 1
        self._asked[self._num_asked] = future
        self._wire.send(Ask(self._num_asked, op, args))
        return future

    def tell(self, facts: SharedFacts) -> asyncio.Future[Any]:
        """Has it know these facts: one that starts, before it serves. The future is as that of `ask`."""
        if self._wire is not None and not self.is_up:
            self._wire.send(Ask(0, "facts", {"facts": msgspec.to_builtins(facts)}))
        return self.ask("facts", facts=msgspec.to_builtins(facts))

    def drain(self) -> asyncio.Future[Any]:
        """Has it take no new requests: one that starts, from its first moment on."""
        if self._wire is not None and not self.is_up:
            self._wire.send(Ask(0, "drain"))
        return self.ask("drain")

    def take_news(self) -> list[list[list[int]]]:
        """Returns what it has said of prefixes since the last call."""
        news = list(self.news)
        self.news.clear()
        return news

    def kill(self) -> None:
        """Ends it at once; `run` hears of it."""
        if self._process is not None:
            self._process.kill()

    async def end(self) -> None:
        """Has it close its connections and end; kills it when that takes too long."""
        process = self._process
        if process is not None:
            if self.is_up and self._wire is not None:
                self._wire.send(Ask(0, "end"))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, END_TIMEOUT_S)
            process.kill()
            await asyncio.to_thread(process.wait)
        self.listener.close()

    @property
    def is_away(self) -> bool:
        """Returns whether no process seems to accept its connections."""
        return not self.is_up or time.monotonic() - self.heard_s > SILENT_S

    @property
    def fault(self) -> str:
        """Says why it did not begin to serve; "" where it did."""
        error = self.is_ready.exception() if self.is_ready.done() else None
        return "" if error is None else str(error)

    def _hear(self, message: object) -> None:
        self.heard_s = time.monotonic()
        match message:
            case Answer(0, value):
                self.figures = msgspec.convert(value, Figures)
                if self.figures.news:
                    self.news.append(self.figures.news)
                if not self.is_up:
                    self.is_up = True
                    self.is_ready.set_result(None)
            case Answer(number, value):
                future = self._asked.pop(number, None)
                if future is not None and not future.done():
                    future.set_result(value)
            case Unable(reason) if not self.is_ready.done():
                self.is_ready.set_exception(StartupError(reason))

    async def _bury(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()  # whoever has hung up is of no use
        status = await asyncio.to_thread(process.wait)
        for future in self._asked.values():
            if not future.done():
                future.set_result(None)
        self._asked.clear()
        if not self.is_ready.done():
            self.is_ready.set_exception(StartupError(f"a front ended at its start, with status {status}"))


class Fronts:
    """All other fronts, for the one that owns the engine and the state. Event-loop thread only."""

    def __init__(
        self, config: Config, folder: Path, listeners: Sequence[socket.socket], app: Starlette, *, factory: str = REAL
    ) -> None:
        self._app = app
        self._state: ServerState = app.state.server
        self._folder = folder
        self._told = self._facts()
        self._telling = asyncio.Lock()
        self._retired: list[Sample] = []  # what fronts that are gone had counted
        self._is_open = False  # all have started
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._passing: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._told_failure: str | None = None  # of the engine
        self._draining: list[asyncio.Future[Any]] | None = None  # once it drains: done where a front knows
        self._all = [
            FrontProcess(Order(config, number, str(folder), factory, self._told), listener)
            for number, listener in enumerate(listeners, start=1)
        ]
        self._state.common.fronts = self
        if self._state.client.replicas:
            company = cast("Router", self._state.client).company
            company.others = self
            company.prefixes.share()
        self._state.lifecycle.services.append(self)
        self.state = app.state  # as an application has it

    async def open(self) -> None:
        """Starts them; returns when all are ready. Raises StartupError."""
        self._passing = await asyncio.start_unix_server(self._answer, path=str(self._folder / OWNER))
        self._tasks = [asyncio.create_task(self._keep(front)) for front in self._all]
        if self._state.client.replicas:
            self._tasks.append(asyncio.create_task(self._look_at_replicas(cast("Router", self._state.client))))
        await asyncio.sleep(0)
        try:
            for front in self._all:
                await front.is_ready
        except StartupError:
            await self.close()
            raise
        self._is_open = True

    def share_with(self, server: Accepting) -> None:
        """Has the owner's server take the connections of each front that is not there, from now on."""
        self._tasks.append(asyncio.create_task(self._look(server)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call as the application does; tells the others what it has changed before its client hears of
        it."""

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self.tell()
            await send(message)

        await self._app(scope, receive, send_told if scope["type"] == "http" else send)

    async def tell(self) -> None:
        """Has the others know what has changed since they were told; returns when they do."""
        async with self._telling:  # else what was said first could be taken for what was said last
            if self._facts() != self._told:
                await self._tell()

    async def any_says(self, question: str, number: int) -> bool:
        """Says whether any other front answers a question about a replica with yes."""
        return any(await self._ask_all("question", question=question, replica=number))

    @property
    def num_running(self) -> int:
        """Requests of the other fronts that have not ended, as they said last. One that is still to hear that it drains
        may have taken another."""
        told = sum(front.figures.num_running for front in self._all if front.is_up)
        return told + sum(not future.done() for future in self._draining or ())

    @property
    def num_asked(self) -> int:
        """Requests that the engine has of the other fronts, as those that speak said last."""
        return sum(front.figures.num_asked for front in self._all if not front.is_away)

    async def abort(self, rid: str | None, *, owner: str | None) -> int:
        """Aborts requests of the other fronts, as Common.abort does. Returns how many there were."""
        return sum(count or 0 for count in await self._ask_all("abort", rid=rid, reason="client", owner=owner))

    def abort_all(self, reason: str) -> int:
        """Aborts all requests of the other fronts, without waiting. Returns how many there were, as they said last."""
        for front in self._all:
            front.ask("abort", rid=None, reason=reason, owner=None)
        return self.num_running

    async def totals(self, own: Metrics) -> Totals:
        """Returns the metrics of all fronts."""
        await self._ask_all("figures")
        return Totals(own, [self._retired, *(front.figures.samples for front in self._all)])

    async def report(self) -> list[dict[str, Any]]:
        """Returns what `/status` says of the fronts."""
        await self._ask_all("figures")
        own: dict[str, Any] = {"front": 0, "pid": os.getpid(), "up": True, "num_running": self._state.num_running}
        return [own | {"num_replacements": 0}] + [
            {
                "front": front.order.number,
                "pid": front.pid,
                "up": front.is_up,
                "num_running": front.figures.num_running,
                "num_replacements": front.num_replacements,
            }
            for front in self._all
        ]

    def reload(self) -> None:
        """Has the others read keys and certificates again."""
        for front in self._all:
            front.ask("reload")

    def start(self) -> None:
        """Does nothing: they have started before the server takes requests."""

    def drain(self) -> None:
        """Has the others take no new requests. One that ends now is not replaced."""
        self._draining = [front.drain() for front in self._all]

    async def close(self) -> None:
        """Ends the others."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._passing is not None:
            self._passing.close()
        await asyncio.gather(*(front.end() for front in self._all))
        for task in (*self._tasks, *self._calls):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._calls, return_exceptions=True)

    async def _keep(self, front: FrontProcess) -> None:
        """Keeps a front running."""
        loop, delay_s = asyncio.get_running_loop(), FIRST_DELAY_S
        while True:
            began_s = loop.time()
            await front.run(self._facts)
            fault = front.fault
            if self._is_closing or self._draining is not None or (fault and not self._is_open):
                return
            if fault:
                log.error("front %d: %s", front.order.number, fault)
            self._retired = added(self._retired, front.figures.samples)
            front.figures = Figures(0)
            front.num_replacements += 1
            delay_s = FIRST_DELAY_S if loop.time() - began_s > STEADY_S else min(LONGEST_DELAY_S, 2 * delay_s)
            log.warning("front %d has ended; another one starts", front.order.number)
            if loop.time() - began_s <= STEADY_S:
                await asyncio.sleep(delay_s)

    async def _look(self, server: Accepting) -> None:
        """Sees to it, again and again, that somebody takes the connections of all fronts, that none stays frozen, and
        that all know when no engine is to be expected."""
        before_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            self._end_frozen(min(now_s - before_s, 2 * LOOK_S))  # more than that it was this process that slept
            before_s = now_s
            for front in self._all:
                if front.is_away and not front.is_covered and front.listener.family != socket.AF_UNIX:
                    with contextlib.suppress(OSError):  # no descriptor is left; there may be one at the next look
                        await server.cover(front.listener)
                        front.is_covered = True
                elif front.is_covered and not front.is_away:
                    await server.uncover(front.listener)
                    front.is_covered = False
            failure, before = self._state.client.failure, self._told_failure
            self._told_failure = failure
            if failure is not None and failure != before:
                for front in self._all:
                    front.ask("down", reason=failure)
            await asyncio.sleep(LOOK_S)

    def _end_frozen(self, seconds: float) -> None:
        """Ends fronts that have not spoken for --freeze-grace-s, counting only seconds in which they could have."""
        for front in self._all:
            front.silent_s = front.silent_s + seconds if front.is_up and front.is_away else 0.0
            if front.silent_s > self._state.context.config.freeze_grace_s:
                log.error("front %d is stopped or gets no CPU: another one starts", front.order.number)
                front.kill()

    async def _look_at_replicas(self, router: Router) -> None:
        """Has all fronts know, again and again, which replicas are there, what each has to do for the others, and what
        they have given to it."""
        company = router.company
        while True:
            await self.tell()
            own = [replica.load for replica in router.replicas]
            loads = {front: (not front.is_away and front.figures.loads) or [0] * len(own) for front in self._all}
            news = {front: front.take_news() for front in self._all}
            own_news = company.prefixes.take_news()
            company.hear_others([sum(of) for of in zip(*loads.values(), strict=True)], chain(*news.values()))
            for front in self._all:
                others = [other for other in self._all if other is not front]
                sums = [sum(of) for of in zip(own, *(loads[other] for other in others), strict=True)]
                told = [] if front.is_away else [own_news, *chain(*(news[other] for other in others))]
                front.ask("others", loads=sums, news=told)
            await asyncio.sleep(LOOK_S)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            await answer_passed(self, reader, writer)
        finally:
            self._calls.discard(task)

    def _facts(self) -> SharedFacts:
        context = self._state.context
        level = logging.getLogger(LOGGER_NAME).getEffectiveLevel()
        return SharedFacts(
            dict(self._state.adapters),
            context.info.model_path,
            context.config.weight_version,
            level,
            [replica.facts for replica in self._state.client.replicas],
        )

    async def _tell(self) -> None:
        """Has all know the facts of now. One that does not say that it does is replaced, and knows them then."""
        facts = self._facts()
        futures = {front: front.tell(facts) for front in self._all}
        if futures:
            await asyncio.wait(futures.values(), timeout=ASK_TIMEOUT_S)
        for front, future in futures.items():
            if not future.done():
                log.error("front %d does not answer: it is killed, and another one starts", front.order.number)
                front.kill()
        self._told = facts

    async def _ask_all(self, op: str, **args: Any) -> list[Any]:
        """Returns what each front answers; None of one that is gone, or does not answer. One that was
        silent before is not waited for."""
        futures = {front: front.ask(op, **args) for front in self._all}
        present = [future for front, future in futures.items() if not front.is_away]
        if present:
            await asyncio.wait(present, timeout=ASK_TIMEOUT_S)
        return [future.result() if future.done() else None for future in futures.values()]
