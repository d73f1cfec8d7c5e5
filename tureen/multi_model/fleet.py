"""Loads models when they are asked for, within a limit of memory, and unloads those that were used longest ago."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

from tureen.clients.queue_shares import runs_to_displace
from tureen.clients.quotas import current_work
from tureen.errors import Conflict, InvalidRequest, StartupError, TureenError, Unavailable
from tureen.log import get_logger
from tureen.multi_model.member import Member, Waiter
from tureen.multi_model.memory_budget import GIB, Room
from tureen.multi_model.pauses import Pauses
from tureen.multi_model.register import Register, Starter
from tureen.requests.preparing import probe_when_idle
from tureen.requests.state import DRAIN_RETRY_S, ServerState

log = get_logger("fleet")


class Fleet:
    """The models of one server. The first is the default model. Event-loop thread only.

    One model is loaded at a time, in the order in which they were asked for.
    """

    def __init__(self, members: Sequence[Member], limit_bytes: int, starter: Starter) -> None:
        self.register = Register(members)
        self.room = Room(self.register.members, limit_bytes, starter.measure, self._unload_later)
        self._starter = starter
        self._pauses = Pauses(self.register.members)
        self._turn = asyncio.Lock()  # held by who loads or unloads
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: dict[Member, asyncio.Task[None]] = {}
        self._is_draining = False

    @property
    def default(self) -> Member:
        return self.members[0]

    # ---- who is asked for

    @property
    def members(self) -> list[Member]:
        """The models, in the order of the settings; then those that joined."""
        return self.register.members

    def find(self, name: str) -> Member | None:
        """Returns the model that a request's `model` means; None: there is none. See ModelNames."""
        return self.register.find(name)

    def names(self) -> list[str]:
        """Returns the names that requests may use: models and their adapters."""
        return self.register.names()

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
        self.room.hear_leaving(member)

    def _check(self, member: Member, now_s: float) -> None:
        """Raises Unavailable when this client may not wait for the model now. Clients share the places."""
        if self._is_draining:
            raise _draining()
        if now_s < member.loads.retry_s:
            raise _failed(member, now_s)
        num_free = member.config.max_queued_requests - len(member.waiters)
        if num_free > 0:
            return
        displaced = runs_to_displace(member.waiters, current_work().account, 1, num_free)
        if displaced is None:
            raise _full(member)
        for waiter in displaced:
            waiter.refuse(_full(member))
            del member.waiters[waiter]

    # ---- loading

    def _want(self, member: Member) -> None:
        """Has a model loaded that somebody waits for."""
        if member not in self._loading:
            self._loading[member] = task = asyncio.create_task(self._load(member))
            self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, member: Member) -> None:
        """Loads a model when its turn comes, and lets in who waits for it."""
        try:
            async with self._turn:
                if member.standing != "loaded" and member.is_wanted and await self.room.make(member):
                    await self._start(member)
                if member.standing == "loaded":
                    member.admit()
        except TureenError as error:
            self._refuse(member, error)
        except Exception as error:  # an edge: who waits must hear of it
            log.exception("model %s could not be loaded", member.name)
            self._refuse(member, StartupError(f"an internal error: {type(error).__name__}"))
        finally:
            self._loading.pop(member, None)

    def _refuse(self, member: Member, error: TureenError) -> None:
        """Tells all who wait for a model why it cannot be loaded."""
        member.standing = "unloaded"
        if isinstance(error, InvalidRequest):
            member.refuse(lambda: error)
            return
        log.error("model %s could not be loaded: %s", member.name, error.message)
        now_s = asyncio.get_running_loop().time()
        member.loads.fail(error.message, now_s)
        member.refuse(lambda: _failed(member, now_s))

    async def _start(self, member: Member) -> None:
        """Starts a model's engine; there is room for it. Raises StartupError."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        member.standing = "loading"
        log.info("model %s: loading; it needs %.2f GiB", member.name, member.need_bytes / GIB)
        try:
            if member.client is None:
                await self._starter.launch(member)
                self._probe(member)
            else:
                await member.client.suspension.resume(member.loads.note_phase)
            await self._pauses.catch_up(member)
        except BaseException:
            member.standing = "unloaded"
            raise
        client = member.client
        assert client is not None
        client.suspension.on_demand = lambda: self._hear_demand(member)
        member.loads.succeed(loop.time() - began_s)
        member.used_s = loop.time()
        member.standing = "loaded"
        log.info("model %s: loaded in %.1f s", member.name, member.loads.seconds)

    def _probe(self, member: Member) -> None:
        """Probe the templates of a model that was just loaded for the first time; the server probes the default's."""
        if member is not self.default and member.state is not None:
            self._keep(asyncio.create_task(probe_when_idle(member.state)))

    def _hear_demand(self, member: Member) -> None:
        """Hears that the engine of an unloaded model was asked for something, by who did not come as a request."""
        now_s = asyncio.get_running_loop().time()
        if not self._is_draining and now_s >= member.loads.retry_s:
            member.loads.is_asked_for = True
            self._want(member)

    # ---- what operators ask for

    async def load(self, name: str) -> Member:
        """Loads a model, and returns when it is loaded; one that is not known joins the others. Raises TureenError."""
        member = await self.register.named_or_new(name, self._starter, self.room.measure)
        member.loads.retry_s = 0.0
        if not member.is_ready:
            waiter = self.wait_for(member)
            try:
                await waiter.done
            finally:
                self.release(member, waiter)
        return member

    async def unload(self, name: str) -> Member:
        """Unloads a model. Raises NotFound, and Conflict while requests use it."""
        member = self.register.named(name)
        async with self._turn:
            if member.is_busy:
                raise Conflict(
                    f"the model {member.name} has running requests; wait until they finish, or abort them",
                    field="model",
                    code="model_busy",
                )
            if member.standing == "loaded":
                await self.room.unload(member)
        return member

    def pause_later(self, *, is_paused: bool) -> None:
        """Has the models that are not loaded now begin paused, or not, when they are."""
        self._pauses.note(is_paused=is_paused)

    def retire(self, state: ServerState) -> None:
        """Unloads the model of a state when the requests that use it have their answers."""
        for member in self.members:
            if member.state is state:
                member.is_retiring = True
                self.room.hear_leaving(member)

    def _unload_later(self, member: Member) -> None:
        self._keep(asyncio.create_task(self._retire(member)))

    async def _retire(self, member: Member) -> None:
        with contextlib.suppress(Conflict):
            await self.unload(member.name)

    async def pull(self, name: str) -> Member:
        """Fetches a model's files, without loading it; one that is not known joins the others. Raises TureenError."""
        member = await self.register.named_or_new(name, self._starter, self.room.measure)
        await self.room.measure(member)
        return member

    async def begin(self) -> None:
        """Loads the default model. Raises StartupError."""
        member = self.default
        member.loads.is_asked_for = True
        try:
            async with self._turn:
                await self.room.make(member)
                await self._start(member)
        except InvalidRequest as error:
            raise StartupError(error.message, field="models_memory") from None
        member.admit()

    def report(self) -> dict[str, Any]:
        """Returns what `/status` says of all."""
        return {
            "models": [member.report() for member in self.members],
            "memory": {"limit_bytes": self.room.limit_bytes, "used_bytes": self.room.used_bytes},
        }

    # ---- a Service

    def start(self) -> None:
        """Begins with nothing: models are loaded when they are asked for."""

    def drain(self) -> None:
        """Refuses all who wait for a model."""
        self._is_draining = True
        for member in self.members:
            for waiter in member.waiters:
                waiter.refuse(_draining())
            member.waiters.clear()

    async def close(self) -> None:
        """Ends all loads, and the engines of all models but the default one, which the server closes."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self.members[1:] if member.client is not None))


def _draining() -> Unavailable:
    return Unavailable("the server is shutting down; try another one", code="draining", retry_after_s=DRAIN_RETRY_S)


def _full(member: Member) -> Unavailable:
    return Unavailable(
        f"{member.config.max_queued_requests} requests already wait for the model {member.name} to load, and this "
        "client has its share of them; try again later, or start the server with a larger --max-queued-requests",
        code="queue_full",
        retry_after_s=max(1, math.ceil(member.loads.seconds)),
    )


def _failed(member: Member, now_s: float) -> Unavailable:
    return Unavailable(
        f"the model {member.name} could not be loaded; the server's log says why",
        code="model_not_loaded",
        retry_after_s=max(1, math.ceil(member.loads.retry_s - now_s)),
    )
