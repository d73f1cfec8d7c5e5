"""Holds the facts about one HTTP request that no dialect decides: its client, its limits, the form of its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tureen.clients.keys import NO_LIMITS, Limits
from tureen.clients.quotas import ClientId, ClientWork
from tureen.errors import TureenError
from tureen.fields.ignored import Telling
from tureen.http.errors import error_response

if TYPE_CHECKING:
    from tureen.requests.generation import RequestTrace
    from tureen.requests.state import ServerState

SCOPE_KEY = "tureen.call"
"""Key of the ClientCall in an ASGI scope; only this module, `replay.py` and `inner_call.py` use it."""


@dataclass
class ClientCall:
    """The facts about one HTTP request that the gate (middleware.py) determines and other code needs. It is stored in
    the ASGI scope."""

    request_id: str = ""
    client_name: str = ""  # of its API key, else of its TLS certificate; "" = anonymous
    limits: Limits = NO_LIMITS  # of its API key
    admin_refusal: TureenError | None = None  # error for an action that needs the admin key; None = it may act
    render_error: Callable[[TureenError], Response] = error_response  # writes errors in the form of the called API
    send_part: Send | None = None
    """Sends the parts of a stream directly, bypassing middleware that reads only the head of an answer."""
    has_client_left: bool = False
    is_elsewhere: bool = False  # another front answers it
    refusal_status: int = 0  # status by which the connection refused the rest of the request; 0 = it did not
    answered_by: ServerState | None = None  # the model that the request named, if the server has several
    work: ClientWork | None = None  # None: the route's use is not limited or counted
    trace: RequestTrace | None = None  # None: it is not recorded
    telling: Telling = field(default_factory=Telling)  # its fields that have no effect

    def sent_by(self, send: Send) -> ClientCall:
        """Returns a copy of the call whose stream is sent by `send`; both share their work and their ignored fields."""
        return replace(self, send_part=send)

    def client_id(self, scope: Scope) -> ClientId:
        """Returns the identity of the client: its name, or its IP address if it has none."""
        if self.client_name:
            return "name", self.client_name
        return "address", scope["client"][0] if scope["client"] else ""

    @property
    def num_tokens(self) -> int:
        """Tokens generated for the call, whether or not they were sent."""
        return 0 if self.work is None else self.work.num_tokens


def call_of(scope: Scope) -> ClientCall:
    """Returns the call of an ASGI scope. The first caller creates it."""
    call: ClientCall = scope.setdefault(SCOPE_KEY, ClientCall())
    return call


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response_for(error: TureenError, scope: Scope) -> Response:
    """Returns the error in the form of the API that was called."""
    call = call_of(scope)
    error.request_id = call.request_id
    return call.render_error(error)
