"""Loads models when they are asked for, within a limit of memory, and unloads those that were used longest ago."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from tureen.errors import Conflict, InvalidRequest, StartupError, TureenError, Unavailable
from tureen.fleet.member import Member, Waiter
from tureen.log import get_logger
from tureen.requests.model_field import ANY, unknown_model
from tureen.requests.state import DRAIN_RETRY_S, ServerState

GIB = 1 << 30

Measure = Callable[[Member, int], Awaitable[int]]
"""Finds a model's files and returns the bytes that it needs, of so many that its share is. Raises StartupError."""

Launch = Callable[[Member], Awaitable[None]]
"""Starts a model's engine, which then is ready. Raises StartupError."""

log = get_logger("fleet")


class Fleet:
    """The models of one server. The first is the default model. Event-loop thread only.

    One model is loaded at a time, in the order in which they were asked for.
    """

    def __init__(self, members: Sequence[Member], limit_bytes: int, measure: Measure, launch: Launch) -> None:
        self.members = list(members)
        self.limit_bytes = limit_bytes
        self._measure = measure
        self._launch = launch
        self._turn = asyncio.Lock()  # held by who loads or unloads
        self._news = asyncio.Event()  # somebody has left
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def default(self) -> Member:
        return self.members[0]

    @property
    def used_bytes(self) -> int:
        """The memory of the models that are loaded, or on their way."""
        return sum(member.need_bytes for member in self.members if member.standing != "unloaded")

    # ---- who is asked for

    def find(self, name: str) -> Member | None:
        """Returns the model that a request's `model` means; None: there is none. See ModelNames."""
        if name in ANY:
            return self.default
        exact = (member for member in self.members if member.name == name)
        return next(exact, None) or next(
            (member for member in self.members if member.names.adapter(name) is not None), None
        )

    def names(self) -> list[str]:
        """Returns the names that requests may use: models and their adapters."""
        return [name for member in self.members for name in (member.name, *member.adapters)]

    # ---- who uses it

    def wait_for(self, member: Member) -> Waiter:
        """Returns a waiter that is done when the model is loaded; then it holds the model until `release`. Raises
        Unavailable where it need not wait."""
        loop = asyncio.get_running_loop()
        self._check(member, loop.time())
        waiter = Waiter(loop.time())
        member.waiters[waiter] = None
        self._want(member)
        return waiter

    def release(self, member: Member, waiter: Waiter | None = None) -> None:
        """Lets a model go that was entered, or waited for."""
        if waiter is not None and not waiter.holds:
            member.waiters.pop(waiter, None)
        else:
            member.leave()
        self._hear_leaving(member)

    def _check(self, member: Member, now_s: float) -> None:
        """Raises Unavailable when nobody may wait for this model now."""
        if self._is_draining:
            raise _draining()
        if now_s < member.retry_s:
            raise _failed(member, now_s)
        if len(member.waiters) >= member.config.max_queued_requests:
            raise Unavailable(
                f"{len(member.waiters)} requests wait until the model {member.name} is loaded; try again later",
                code="queue_full",
                retry_after_s=max(1, math.ceil(member.load_s)),
            )

    # ---- loading

    def _want(self, member: Member) -> None:
        """Has a model loaded that somebody waits for."""
        if member.loading is None:
            member.loading = asyncio.create_task(self._load(member))
            self._keep(member.loading)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, member: Member) -> None:
        """Loads a model when its turn comes, and lets in who waits for it."""
        try:
            async with self._turn:
                if member.standing != "loaded" and member.is_wanted and await self._make_room(member):
                    await self._start(member)
                if member.standing == "loaded":
                    member.admit()
        except TureenError as error:
            self._refuse(member, error)
        except Exception as error:  # an edge: who waits must hear of it
            log.exception("model %s could not be loaded", member.name)
            self._refuse(member, StartupError(f"an internal error: {type(error).__name__}"))
        finally:
            member.loading = None

    def _refuse(self, member: Member, error: TureenError) -> None:
        """Tells all who wait for a model why it cannot be loaded."""
        member.standing = "unloaded"
        if isinstance(error, InvalidRequest):
            member.refuse(lambda: error)
            return
        log.error("model %s could not be loaded: %s", member.name, error.message)
        member.fail(error.message)
        now_s = asyncio.get_running_loop().time()
        member.refuse(lambda: _failed(member, now_s))

    async def _start(self, member: Member) -> None:
        """Starts a model's engine; there is room for it. Raises StartupError."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        member.standing = "loading"
        log.info("model %s: loading; it needs %.2f GiB", member.name, member.need_bytes / GIB)
        try:
            if member.client is None:
                await self._launch(member)
            else:
                await member.client.resume(member.note_phase)
        except BaseException:
            member.standing = "unloaded"
            raise
        client = member.client
        assert client is not None
        client.on_demand = lambda: self._hear_demand(member)
        member.succeed(loop.time() - began_s)
        member.standing = "loaded"
        log.info("model %s: loaded in %.1f s", member.name, member.load_s)

    def _hear_demand(self, member: Member) -> None:
        """Hears that the engine of an unloaded model was asked for something, by who did not come as a request."""
        now_s = asyncio.get_running_loop().time()
        if not self._is_draining and now_s >= member.retry_s:
            member.is_asked_for = True
            self._want(member)

    async def _make_room(self, member: Member) -> bool:
        """Unloads models until this one fits. Returns False when nobody wants it any more.

        Raises InvalidRequest when it can never fit, StartupError when there is no such model.
        """
        need = member.need_bytes = await self._measure(member, self.limit_bytes // len(self.members))
        if need > self.limit_bytes:
            member.need_bytes = 0
            raise InvalidRequest(
                f"the model {member.name} needs {need / GIB:.2f} GiB of memory, and all models together may have "
                f"{self.limit_bytes / GIB:.2f} GiB; start the server with a larger --models-memory, or the model with "
                "a smaller max_total_tokens",
                field="model",
                code="model_too_large",
            )
        loaded = [other for other in self.members if other.client is not None]
        try:
            while self.used_bytes + need > self.limit_bytes:
                if not member.is_wanted:
                    return False
                self._news.clear()
                idle = [other for other in loaded if other.standing == "loaded" and not other.is_busy]
                if idle:
                    await self._unload(min(idle, key=_last_use))
                    continue
                await self._wait_for_idle(loaded)
        finally:
            for other in loaded:
                other.is_leaving = False
                if other.client is not None and not other.is_retiring:
                    other.client.on_idle = None
        return True

    async def _wait_for_idle(self, loaded: Sequence[Member]) -> None:
        """Waits until somebody has left, and lets nobody in to the model that was used longest ago."""
        running = [other for other in loaded if other.standing == "loaded"]
        if not any(other.is_leaving for other in running):
            min(running, key=_last_use).is_leaving = True
        for other in running:
            assert other.client is not None
            other.client.on_idle = partial(self._hear_leaving, other)
        await self._news.wait()

    async def _unload(self, member: Member) -> None:
        """Ends a model's engine. Nobody uses it."""
        assert member.client is not None
        member.standing = "unloading"
        await member.client.suspend()
        member.standing = "unloaded"
        log.info("model %s: unloaded", member.name)

    # ---- what operators ask for

    async def load(self, name: str) -> Member:
        """Loads a model, and returns when it is loaded. Raises TureenError."""
        member = self.find(name)
        if member is None:
            raise unknown_model(name, self.names())
        member.retry_s = 0.0
        if not member.is_ready:
            waiter = self.wait_for(member)
            try:
                await waiter.done
            finally:
                self.release(member, waiter)
        return member

    async def unload(self, name: str) -> Member:
        """Unloads a model. Raises NotFound, and Conflict while requests use it."""
        member = self.find(name)
        if member is None:
            raise unknown_model(name, self.names())
        async with self._turn:
            if member.is_busy:
                raise Conflict(
                    f"the model {member.name} works on requests; wait until they have ended, or abort them",
                    field="model",
                    code="model_busy",
                )
            if member.standing == "loaded":
                await self._unload(member)
        return member

    def retire(self, state: ServerState) -> None:
        """Unloads the model of a state when the requests that use it have their answers."""
        for member in self.members:
            if member.state is state:
                member.is_retiring = True
                self._hear_leaving(member)

    def _hear_leaving(self, member: Member) -> None:
        """Hears that somebody may use a model no longer."""
        self._news.set()
        if not member.is_retiring or member.client is None:
            return
        member.client.on_idle = partial(self._hear_leaving, member)
        if not member.is_busy:
            member.is_retiring, member.client.on_idle = False, None
            self._keep(asyncio.create_task(self._retire(member)))

    async def _retire(self, member: Member) -> None:
        with contextlib.suppress(Conflict):
            await self.unload(member.name)

    async def pull(self, name: str) -> Member:
        """Fetches a model's files, without loading it. Raises TureenError."""
        member = self.find(name)
        if member is None:
            raise unknown_model(name, self.names())
        await self._measure(member, self.limit_bytes // len(self.members))
        return member

    async def begin(self) -> None:
        """Loads the default model. Raises StartupError."""
        member = self.default
        member.is_asked_for = True
        try:
            async with self._turn:
                await self._make_room(member)
                await self._start(member)
        except InvalidRequest as error:
            raise StartupError(error.message, field="models_memory") from None
        member.admit()

    def report(self) -> dict[str, Any]:
        """Returns what `/status` says of all."""
        return {
            "models": [member.report() for member in self.members],
            "memory": {"limit_bytes": self.limit_bytes, "used_bytes": self.used_bytes},
        }

    # ---- a Service

    def start(self) -> None:
        """Begins with nothing: models are loaded when they are asked for."""

    def drain(self) -> None:
        """Refuses all who wait for a model."""
        self._is_draining = True
        for member in self.members:
            for waiter in member.waiters:
                if not waiter.done.done():
                    waiter.done.set_exception(_draining())
                    waiter.done.exception()
            member.waiters.clear()

    async def close(self) -> None:
        """Ends all loads, and the engines of all models but the default one, which the server closes."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self.members[1:] if member.client is not None))


def _last_use(member: Member) -> float:
    return member.used_s


def _draining() -> Unavailable:
    return Unavailable("the server is shutting down; try another one", code="draining", retry_after_s=DRAIN_RETRY_S)


def _failed(member: Member, now_s: float) -> Unavailable:
    return Unavailable(
        f"the model {member.name} could not be loaded; the server's log says why",
        code="model_not_loaded",
        retry_after_s=max(1, math.ceil(member.retry_s - now_s)),
    )
