"""Declares what the owner front knows about the other fronts, for which it keeps the shared state."""

from __future__ import annotations

import socket
from typing import Any, Protocol

from tureen.metrics import Metrics, Series


class Accepting(Protocol):
    """A server that can accept the connections of another front's socket."""

    async def cover(self, listener: socket.socket) -> None:
        """Begins to accept its connections as well."""

    async def uncover(self, listener: socket.socket) -> None:
        """Leaves its connections to the other front; those that were accepted stay."""


class OtherFronts(Protocol):
    """The other fronts. This one, the owner, keeps the shared state."""

    @property
    def num_running(self) -> int:
        """Number of their unfinished requests."""

    async def abort(self, rid: str | None, *, owner: str | None) -> int:
        """Aborts their requests, as Common.abort does. Returns the number of aborted requests."""

    async def tell(self) -> None:
        """Sends them the changes that operators made here, before any request can depend on them."""

    def abort_all(self, reason: str) -> int:
        """Aborts all their requests. Returns the number of aborted requests."""

    async def totals(self, own: Metrics) -> Series:
        """Returns the metrics of all fronts."""

    async def report(self) -> list[dict[str, Any]]:
        """Returns the part of `/status` about all fronts."""

    def reload(self) -> None:
        """Makes them reload keys and certificates."""

    def share_with(self, server: Accepting) -> None:
        """Makes a server accept the connections of each missing front from now on."""
