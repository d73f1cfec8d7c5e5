"""What a dialect is, and what all of them need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from starlette.requests import Request
from starlette.routing import Route

from tureen.api.sse import until_gone
from tureen.api.state import ServerState

T = TypeVar("T")

Access = Literal["open", "user", "admin"]
"""Who may call a route: anybody, who has an API key, who has the admin key."""

Dialect = Callable[[ServerState], "list[Entry]"]
"""A module's `routes(state)`: the paths of one API."""


class Entry(Route):
    """A route that says who may call it. A route that does not is closed to everybody."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        access: Access,
        methods: Sequence[str] = ("GET",),
        is_limited: bool = True,
    ) -> None:
        """`is_limited`: what users send here counts towards --max-client-requests."""
        super().__init__(path, endpoint, methods=list(methods))
        self.access = access
        self.is_limited = is_limited and access == "user" and "GET" not in methods


def client_name(request: Request) -> str:
    """Who sent a request: the name of its API key, or the subject of its certificate; "" = nobody in particular."""
    return str(request.scope.get("client_name", ""))


class ClientGone(Exception):
    """The client closed the connection before its answer was there; nobody reads what comes."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; when the client leaves first, cancels it and raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
