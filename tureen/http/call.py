"""What belongs to one HTTP request and is no dialect's business: who sent it, how its errors are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.responses import Response
from starlette.types import Scope, Send

from tureen.errors import TureenError
from tureen.http.errors import error_response
from tureen.requests.keys import NO_LIMITS, Limits
from tureen.requests.quotas import ClientId, ClientWork

SCOPE_KEY = "tureen.call"


@dataclass
class ClientCall:
    """The facts about one HTTP request that the gate finds out and others need. It travels in the ASGI scope."""

    request_id: str = ""
    client_name: str = ""  # by its key, else by its certificate; "" = nobody in particular
    limits: Limits = NO_LIMITS  # of its key
    admin_refusal: TureenError | None = None  # why it may not do what needs the admin key; None = it may
    render_error: Callable[[TureenError], Response] = error_response  # as the API that was called writes errors
    send_part: Send | None = None
    """Takes what comes after the head of a stream, past those who look at heads only."""
    has_client_left: bool = False
    refusal_status: int = 0  # of the connection, before the application answered; 0 = it refused nothing
    work: ClientWork | None = None  # None: the route is not one whose use is counted

    def sent_by(self, send: Send) -> ClientCall:
        """The same call with its stream going elsewhere; the work is shared."""
        return replace(self, send_part=send)

    def who(self, scope: Scope) -> ClientId:
        """The client; those without a name are told apart by their address."""
        if self.client_name:
            return "name", self.client_name
        return "address", scope["client"][0] if scope["client"] else ""

    @property
    def num_tokens(self) -> int:
        """Tokens that were made for it, whether or not they were sent."""
        return 0 if self.work is None else self.work.num_tokens


def call_of(scope: Scope) -> ClientCall:
    """The call that a scope belongs to; the first to ask begins it."""
    call: ClientCall = scope.setdefault(SCOPE_KEY, ClientCall())
    return call


def rendered(error: TureenError, scope: Scope) -> Response:
    """The error as the API that was called writes it."""
    return call_of(scope).render_error(error)
