"""Decides, for each call to a front, whether it can be answered here or the owner has what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from tureen.api_workers.proxy import pass_on
from tureen.config import Config
from tureen.errors import Conflict
from tureen.http.call import ClientCall, call_of
from tureen.http.dialect import Entry
from tureen.http.middleware import authorization, find_route
from tureen.http.replay import KEY_HEADER
from tureen.requests.state import ServerState

KEPT = ("/v1/responses", "/responses")
"""Routes that use what --responses-store keeps."""

_CALL: ContextVar[ClientCall] = ContextVar("call")


class SessionsElsewhere:
    """Stands for the sessions, which the owner has."""

    def extend(self, *_: Any, **__: Any) -> NoReturn:
        """Has the call answered by the owner."""
        _CALL.get().is_elsewhere = True
        raise Conflict("the session is known to another front")

    def sweep(self) -> None:
        """Does nothing: there are none."""


class Entrance:
    """The ASGI application of a front: answers what needs nothing but the engine, and passes the rest to the owner.

    What it answers are the calls that are work for the engine. Of these the owner answers, too: those whose answer is
    kept (`Idempotency-Key`, --resume-grace, --responses-store), those that continue a session, and those of clients
    with limits, of which it alone has the accounts. Where --usage-db keeps the accounts, it answers all.
    """

    def __init__(self, app: Starlette, config: Config, owner: str) -> None:
        """config: the server's settings, as the owner has them; owner: path of its socket."""
        self.state = app.state
        self._app = app
        self._owner = owner
        limits = config.client_tokens_per_minute or config.max_client_requests
        self._keeps_all = bool(config.resume_grace_s or config.usage_db is not None or limits)
        self._kept = KEPT if config.responses_store is not None else ()
        self._state: ServerState = app.state.server
        self._state.sessions = SessionsElsewhere()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self.is_owners(scope):
            await pass_on(self._owner, scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    def is_owners(self, scope: Scope) -> bool:
        """Says whether the owner is to answer a call, as far as its head tells."""
        if self._keeps_all or scope["path"] in self._kept:
            return True
        route = find_route({**scope, "app": self._app})
        if not isinstance(route, Entry) or not route.is_limited:
            return True
        if any(name == KEY_HEADER for name, _ in scope["headers"]):
            return True
        key = self._state.common.keys.find(authorization(scope))
        return key is not None and (key.limits.tokens_per_minute, key.limits.max_requests) != (None, None)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call here; passes it on where it turns out, before anything is sent, that the owner has what it
        needs."""
        call, seen = call_of(scope), list[Message]()
        is_open = True

        async def receive_noting() -> Message:
            message = await receive()
            if is_open:
                seen.append(message)
            return message

        async def send_unless(message: Message) -> None:
            nonlocal is_open
            if call.is_elsewhere:
                return
            if is_open:
                is_open = False
                seen.clear()
            await send(message)

        token = _CALL.set(call)
        try:
            await self._app(scope, receive_noting, send_unless)
        finally:
            _CALL.reset(token)
        if call.is_elsewhere:
            await pass_on(self._owner, scope, receive, send, _bodies(seen))


def _bodies(seen: Sequence[Message]) -> list[Message]:
    return [message for message in seen if message["type"] == "http.request"]
