"""The memory of a server's models: unloads those that were used longest ago, so that others can be loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from tureen.errors import InvalidRequest
from tureen.log import get_logger
from tureen.multi_model.member import Member

GIB = 1 << 30

Measure = Callable[[Member, int], Awaitable[int]]
"""Finds a model's files and returns the bytes that it needs of its share. Raises StartupError."""

log = get_logger("fleet")


class Room:
    """The memory of all models together: what is used of it, and how more is had."""

    def __init__(
        self, members: Sequence[Member], limit_bytes: int, measure: Measure, retire: Callable[[Member], None]
    ) -> None:
        """`retire`: unloads a retiring model after its last request."""
        self.limit_bytes = limit_bytes
        self._retire = retire
        self._members = members
        self._measure = measure
        self._news = asyncio.Event()  # somebody has left

    @property
    def used_bytes(self) -> int:
        """The memory of the models that are loaded, or on their way."""
        return _together(self._present)

    @property
    def _present(self) -> list[Member]:
        return [member for member in self._members if member.standing != "unloaded"]

    async def measure(self, member: Member) -> int:
        """Finds a model's files, and returns the bytes that it needs. Raises InvalidRequest when it can never fit,
        StartupError when there is no such model."""
        need = await self._measure(member, self.limit_bytes // len(self._members))
        if need > self.limit_bytes:
            raise InvalidRequest(
                f"the model {member.name} needs {need / GIB:.2f} GiB of memory, but all models together may use "
                f"{self.limit_bytes / GIB:.2f} GiB; start the server with a larger --models-memory, or the model with "
                "a smaller max_total_tokens",
                field="model",
                code="model_too_large",
            )
        return need

    async def make(self, member: Member) -> bool:
        """Unloads models until this one fits. Returns False when no request wants it any more.

        Raises InvalidRequest when it can never fit, StartupError when there is no such model.
        """
        member.need_bytes = await self.measure(member)
        loaded = [other for other in self._members if other.client is not None]
        try:
            while _together([*self._present, member]) > self.limit_bytes:
                if not member.is_wanted:
                    return False
                self._news.clear()
                idle = [other for other in loaded if other.standing == "loaded" and not other.is_busy]
                if idle:
                    await self.unload(min(idle, key=_last_use))
                    continue
                await self._wait_for_idle(loaded)
        finally:
            for other in loaded:
                other.is_leaving = False
                if other.client is not None and not other.is_retiring:
                    other.client.suspension.on_idle = None
        return True

    async def _wait_for_idle(self, loaded: Sequence[Member]) -> None:
        """Waits until a request has ended, and admits no request to the model that was used longest ago."""
        running = [other for other in loaded if other.standing == "loaded"]
        if not any(other.is_leaving for other in running):
            min(running, key=_last_use).is_leaving = True
        for other in running:
            assert other.client is not None
            other.client.suspension.on_idle = partial(self.hear_leaving, other)
        await self._news.wait()

    async def unload(self, member: Member) -> None:
        """Ends a model's engine. No request uses it."""
        assert member.client is not None
        member.standing = "unloading"
        await member.client.suspension.suspend()
        if member.share is not None:
            member.share.weights.free()
        member.standing = "unloaded"
        log.info("model %s: unloaded", member.name)

    def hear_leaving(self, member: Member) -> None:
        """Hears that somebody may use a model no longer."""
        self._news.set()
        if not member.is_retiring or member.client is None:
            return
        member.client.suspension.on_idle = partial(self.hear_leaving, member)
        if not member.is_busy:
            member.client.suspension.on_idle = None
            member.is_retiring = False
            self._retire(member)


def _last_use(member: Member) -> float:
    return member.used_s


def _together(members: Iterable[Member]) -> int:
    """Returns the bytes of memory that models take; weights that several have in common count once."""
    total, seen = 0, set()
    for member in members:
        total += member.need_bytes
        if member.shared is not None and member.shared.weights in seen:
            total -= member.shared.num_bytes
        elif member.shared is not None:
            seen.add(member.shared.weights)
    return total
