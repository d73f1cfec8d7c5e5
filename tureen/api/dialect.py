"""What a dialect is, and what all of them need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.routing import Route

from tureen.api.sse import until_gone
from tureen.api.state import ServerState

T = TypeVar("T")

Dialect = Callable[[ServerState], list[Route]]
"""A module's `routes(state)`: the paths of one API."""


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
