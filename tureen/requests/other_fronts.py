"""Declares what a front knows of the fronts beside it, of which it owns what they do not."""

from __future__ import annotations

import socket
from typing import Any, Protocol

from tureen.metrics import Metrics, Series


class Accepting(Protocol):
    """A server that can accept the connections of another front's socket."""

    async def cover(self, listener: socket.socket) -> None:
        """Accepts its connections, too, from now on."""

    async def uncover(self, listener: socket.socket) -> None:
        """Leaves its connections to the other front; those that were accepted stay."""


class OtherFronts(Protocol):
    """The fronts beside this one, which owns what they do not."""

    @property
    def num_running(self) -> int:
        """Requests of theirs that have not ended."""

    async def abort(self, rid: str | None, *, owner: str | None) -> int:
        """Aborts requests of theirs, as Common.abort does. Returns how many there were."""

    async def tell(self) -> None:
        """Has them know what operators have changed here, before anything goes on with it."""

    def abort_all(self, reason: str) -> int:
        """Aborts all requests of theirs. Returns how many there were."""

    async def totals(self, own: Metrics) -> Series:
        """Returns the metrics of all fronts."""

    async def report(self) -> list[dict[str, Any]]:
        """Returns what `/status` says of all fronts."""

    def reload(self) -> None:
        """Has them read keys and certificates again."""

    def share_with(self, server: Accepting) -> None:
        """Has a server take the connections of each front that is not there, from now on."""
