"""The client of an engine that is replaced when it is lost: by an exception, its process's end, a freeze or a hang."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from logging import INFO, WARNING
from typing import Any, Literal, Protocol

import msgspec

from tureen import errors
from tureen.contract.types import (
    EngineFailed,
    EngineHealth,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerateRequest,
    OutputDelta,
    StartupPhase,
    ToEngine,
)
from tureen.log import Progress, get_logger, no_progress
from tureen.serving.client import ReplicaView
from tureen.serving.streams import Interval, Streams, Watch
from tureen.serving.watchdog import Sign, Watchdog

TICK_S = 0.4
"""Seconds between two looks at whether the engine is well."""

STEADY_S = 10.0
"""Seconds of life after which a start counts as successful; so does doing anything for anybody."""

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Seconds between starts that fail: the first delay, doubled each time up to the longest."""

GIVE_UP_AFTER = 3
"""Number of failed starts in a row after which the streams that wait for an engine end. Starts go on nevertheless."""

State = Literal["healthy", "suspect", "replacing", "down", "unloaded"]

log = get_logger("serving")


class Host(Protocol):
    """One engine from its start to its end, in a thread, a process, elsewhere; it is not used again.

    All is called on the event loop's thread. There the host calls what it was made with: for each message of the
    engine, and once when it is lost, with the reason.
    """

    can_be_killed: bool

    async def start(self) -> None:
        """Starts the engine; messages follow: StartupPhase …, then EngineReady or EngineFailed. Raises OSError."""

    def send(self, message: ToEngine) -> None:
        """Sends a message to the engine; does nothing after its end."""

    def sign(self) -> Sign:
        """Returns signs of life; also asks the engine to answer before the next time."""

    async def close(self, *, at_once: bool) -> None:
        """Ends the engine: nothing of it is left then.

        at_once: ends it without a word; otherwise it may finish its step and end its requests.
        """


class Lose(Protocol):
    """A function that hears that an engine is lost."""

    def __call__(self, reason: str, *, is_suspicious: bool = True) -> None:
        """is_suspicious: whether one of the requests may be why."""


MakeHost = Callable[[int, Callable[[FromEngine], None], Lose], Host]
"""Makes a host from an epoch, a function that hears the engine's messages, and one that hears that it is lost. Epochs
count from 1."""


class Starts:
    """The starts of an engine: how many failed, and when it is expected. Times are the loop's."""

    def __init__(self) -> None:
        self.num_failures = 0  # in a row
        self.took_s = 0.0  # that the last one took
        self.due_s = 0.0  # when the engine is expected, or was

    async def delay(self, now_s: float) -> None:
        """Waits before a start, longer after each start that failed."""
        if self.num_failures:
            delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (self.num_failures - 1))
            self.due_s = now_s + delay_s + self.took_s
            await asyncio.sleep(delay_s)


class Suspension:
    """Ends the engine of a client when its memory is needed for others, and starts it again: a part of the client."""

    def __init__(self, client: HealingClient) -> None:
        self._client = client
        self.is_on = False
        self.on_demand: Callable[[], None] | None = None  # called when a suspended engine is asked for something
        self.on_idle: Callable[[], None] | None = None  # called when the engine has nothing to do any more

    @property
    def is_busy(self) -> bool:
        """Says whether the engine has, or is to get, anything to do."""
        return self._client._streams.is_busy

    @property
    def has_other_weights(self) -> bool:
        """Says whether the engine will have other weights than it starts with."""
        return self._client._streams.journal.has_other_weights

    def demand(self) -> None:
        """Hears that something is asked for that needs the engine."""
        if self.on_demand is not None:
            self.on_demand()

    def tell_idle(self) -> None:
        """Tells who wants to know when the engine has nothing to do."""
        if self.on_idle is not None and not self.is_busy:
            self.on_idle()

    async def suspend(self) -> None:
        """Ends the engine, and frees its memory. What is asked for from now on waits until `resume`; `on_demand` hears
        of it."""
        client = self._client
        is_well = client._health.state == "healthy"
        self.is_on = True
        client._epoch += 1
        replacing = client._tasks.pop("replace", None)
        if replacing is not None:
            replacing.cancel()
            await asyncio.gather(replacing, return_exceptions=True)
        client._streams.cut("it was unloaded", is_suspicious=False)
        client._streams.refuse = None
        client._turn("unloaded")
        await self._close_host(at_once=not is_well)

    async def resume(self, progress: Progress = no_progress) -> None:
        """Starts the engine that was suspended, in the state that it had. Raises StartupError."""
        client = self._client
        client._progress = progress
        try:
            client.info = await client._launch()
        except BaseException:
            client._epoch += 1
            await self._close_host(at_once=True)
            raise
        client._progress = no_progress
        self.is_on = False
        client._open()

    def fail_waiting(self, refuse: Callable[[], errors.TureenError]) -> None:
        """Ends what waits for the engine, and refuses what comes until `resume` has brought one."""
        self._client._streams.fail(refuse)

    async def _close_host(self, *, at_once: bool) -> None:
        host, self._client._host = self._client._host, None
        if host is not None:
            await host.close(at_once=at_once)


class HealingClient:
    """An EngineClient that keeps one engine running.

    Every message belongs to the epoch of the host that it comes from. So what an engine says after it was given up is
    not heard, however late it goes on.
    """

    info: EngineInfo
    replicas: Sequence[ReplicaView] = ()

    def __init__(self, make_host: MakeHost, *, watchdog_timeout_s: float, freeze_grace_s: float) -> None:
        self._make_host = make_host
        self._streams = Streams()
        self._watchdog = Watchdog(watchdog_timeout_s, freeze_grace_s)
        self._loop = asyncio.get_running_loop()
        self._progress: Progress = no_progress
        self._health = EngineHealth(state="replacing", reason="it is being started")
        self._epoch = 1
        self._host: Host | None = None  # None: gone, the next one is not begun
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # "watch", "replace"
        self._starts = Starts()
        self._is_closed = False
        self.suspension = Suspension(self)

    async def start(self, progress: Progress = no_progress) -> EngineInfo:
        """Starts the first engine; returns when it is ready. Raises StartupError when it cannot be built."""
        self._progress = progress
        try:
            self.info = await self._launch()
        except BaseException:
            await self.close()
            raise
        self._progress = no_progress
        self._open()
        self._tasks["watch"] = asyncio.create_task(self._watch())
        return self.info

    def generate(
        self, request: GenerateRequest, interval: Interval = 1, watch: Watch | None = None
    ) -> AsyncIterator[OutputDelta]:
        if self.suspension.is_on:
            self.suspension.demand()
        return self._streams.generate(request, interval, watch)

    def abort(self, request_id: str, reason: str = "client") -> None:
        self._streams.abort(request_id, reason)

    async def call(self, op: str, **args: Any) -> object:
        if self.suspension.is_on:
            self.suspension.demand()
        return await self._streams.call(op, **args)

    @property
    def failure(self) -> str | None:
        return None if self._streams.refuse is None else self._streams.refuse().message

    @property
    def health(self) -> EngineHealth:
        state, streams = self._health.state, self._streams
        wait_s = 0.0 if state == "healthy" else max(0.0, self._starts.due_s - self._loop.time())
        if state == "suspect":
            wait_s = self._watchdog.grace_left_s + self._starts.took_s
        return EngineHealth(
            state=state,
            reason=self._health.reason,
            retry_after_s=max(1, math.ceil(wait_s)),
            num_replacements=self._health.num_replacements,
            num_resumed=streams.num_resumed,
            num_poison=streams.num_poison,
        )

    @property
    def stats(self) -> EngineStats:
        return self._streams.stats

    @property
    def num_live(self) -> int:
        return self._streams.num_live

    @property
    def _is_starting(self) -> bool:
        return self.suspension.is_on or "replace" in self._tasks or not self._ready.done()

    async def close(self) -> None:
        """Ends the engine, and makes sure that it does. A second call does nothing."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        if self._host is not None:
            await self._host.close(at_once=self._health.state != "healthy")
            self._host = None
        if self._streams.refuse is None:
            self._streams.fail(lambda: errors.Unavailable("the engine was closed", code="engine_dead"))

    async def _launch(self) -> EngineInfo:
        """Starts the next engine, in the state of the one before. Raises StartupError."""
        began_s = self._loop.time()
        self._starts.due_s = began_s + self._starts.took_s
        self._ready = self._loop.create_future()
        host = self._host = self._make_host(
            self._epoch, partial(self._hear, self._epoch), partial(self._lose, self._epoch)
        )
        self._watchdog.begin(Sign(has_answered=True, processor_s=0.0))
        try:
            await host.start()
            info = await self._ready
            await self._restore(host, info)
        except OSError as error:
            raise errors.StartupError(f"the engine cannot be started: {error}") from None
        except errors.StartupError:
            raise
        except errors.TureenError as error:
            raise errors.StartupError(f"the engine cannot be restored to its state: {error.message}") from None
        self._starts.took_s = self._loop.time() - began_s
        return info

    async def _restore(self, host: Host, info: EngineInfo) -> None:
        """Brings a new engine to the state of those before. Raises TureenError when it cannot be."""
        await self._streams.restore(host.send, info)

    def _open(self) -> None:
        """Sends requests to the engine from now on."""
        assert self._host is not None
        self._starts.due_s = self._loop.time()
        self._watchdog.begin(self._host.sign())
        self._streams.open(self._host.send)
        self._turn("healthy")

    def _hear(self, epoch: int, message: FromEngine) -> None:
        if epoch != self._epoch:
            return
        match message:
            case StartupPhase(name, done, total):
                self._progress(name, done, total)
            case EngineReady(info):
                if not self._ready.done():  # cancelled where the start was interrupted
                    self._ready.set_result(info)
            case EngineFailed(text):
                self._lose(epoch, text)
            case _:
                self._streams.receive(message)
                if self._health.state == "down" and not self._is_starting:
                    self._open()  # a thread that had hung
                if self.suspension.on_idle is not None:
                    self.suspension.tell_idle()

    def _lose(self, epoch: int, reason: str, *, is_suspicious: bool = True) -> None:
        """Hears that the engine of that epoch is lost, by itself."""
        if epoch != self._epoch or self._is_closed:
            return
        if self._is_starting:
            self._streams.cut(reason, is_suspicious=False)
            if not self._ready.done():
                self._ready.set_exception(errors.StartupError(reason))
        else:
            self._replace(reason, is_suspicious=is_suspicious)

    def _replace(self, reason: str, *, is_suspicious: bool) -> None:
        """Gives the engine up and starts another one."""
        self._epoch += 1  # the old one is not heard any more
        has_worked = self._loop.time() - self._starts.due_s > STEADY_S or self._streams.has_use
        self._starts.num_failures = 0 if has_worked else self._starts.num_failures + 1
        self._starts.due_s = self._loop.time() + self._starts.took_s
        self._streams.cut(reason, is_suspicious=is_suspicious)
        self._turn("replacing", reason)
        self._tasks["replace"] = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        """Starts engines until there is one."""
        while True:
            if self._host is not None:
                await self._host.close(at_once=True)  # its memory is free then
                self._host = None
            await self._starts.delay(self._loop.time())
            try:
                info = await self._launch()
            except Exception as error:  # an edge: whatever it is, there must be another try
                if not isinstance(error, errors.StartupError):
                    log.exception("the engine could not be started")
                self._starts.num_failures += 1
                self._epoch += 1
                self._fail_start(str(error))
                continue
            self.info = info
            self._tasks.pop("replace")
            count = self._health.num_replacements + 1
            self._health = msgspec.structs.replace(self._health, num_replacements=count)
            self._open()
            return

    def _fail_start(self, reason: str) -> None:
        log.error("engine: start %d in a row has failed: %s", self._starts.num_failures, reason)
        if self._starts.num_failures >= GIVE_UP_AFTER:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Ends the waiting streams."""
        self._turn("down", reason)

        def refuse() -> errors.TureenError:
            wait_s = self.health.retry_after_s
            return errors.Unavailable(f"the engine is down: {reason}", code="engine_dead", retry_after_s=wait_s)

        self._streams.fail(refuse)

    async def _watch(self) -> None:
        before_s = self._loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            self.look(min(now_s - before_s, 2 * TICK_S))  # more than that it was this process that slept
            self.suspension.tell_idle()
            before_s = now_s

    def look(self, seconds: float) -> None:
        """Judges the engine; counts only the seconds in which this process could have run."""
        host = self._host
        is_starting = self._is_starting
        if host is None or (self._health.state == "down" and not is_starting):
            return
        sign = host.sign()
        if is_starting:  # it may read files for as long as it likes
            sign = sign._replace(has_answered=not sign.is_stopped)
        verdict = self._watchdog.judge(
            sign,
            seconds,
            is_waiting=not is_starting and self._streams.is_waiting,
            num_reports=self._streams.num_reports,
        )
        if is_starting:
            if verdict.state == "frozen":
                self._lose(self._epoch, verdict.reason)
        elif verdict.state in ("well", "suspect"):
            self._streams.is_suspect = verdict.state == "suspect"
            self._turn("suspect" if verdict.state == "suspect" else "healthy", verdict.reason)
        elif host.can_be_killed:
            self._replace(verdict.reason, is_suspicious=verdict.state == "hung")
        else:
            self._give_up(f"{verdict.reason}; an engine in a thread cannot be replaced: restart the server")

    def _turn(self, state: State, reason: str = "") -> None:
        """Notes the state of the engine, and logs it where that is news."""
        before = self._health
        if (state, reason) == (before.state, before.reason):
            return
        self._health = EngineHealth(state=state, reason=reason, num_replacements=before.num_replacements)
        if (self._epoch > 1 or before.state != "replacing") and "unloaded" not in (state, before.state):
            level = INFO if state == "healthy" else WARNING
            log.log(level, "engine: %s -> %s%s", before.state, state, reason and f": {reason}")
