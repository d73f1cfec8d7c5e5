"""What belongs to one HTTP request and is no dialect's business: who sent it, how its errors are written, what runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

from starlette.responses import Response
from starlette.types import Scope, Send

from tureen.api.errors import error_response
from tureen.api.keys import NO_LIMITS, Limits
from tureen.api.quotas import Account, Hold, Who
from tureen.errors import TureenError

SCOPE_KEY = "tureen.call"


class ClientWork:
    """What runs for one HTTP request: whose tokens it uses, what it is called, whether it failed."""

    def __init__(self, account: Account) -> None:
        self.account = account  # who pays
        self.names: set[str] = set()  # what the client calls what runs for it
        self.has_failed = False
        self.num_tokens = 0  # of all outputs, so far
        self.inline_size = 0  # of what the event loop has done for it since others had their turn; see offload.py
        self._ahead: Hold | None = None  # what its runs may use that have not begun

    def begin(self, num_tokens: int) -> None:
        """Its runs may use so many tokens in all. What has begun is not refused in the middle, however it goes on.

        Raises TooManyRequests when its client has not so many left.
        """
        if self._ahead is None:
            self.account.check(num_tokens)
            self._ahead = self.account.hold(num_tokens)

    def share(self, num_tokens: int) -> Hold:
        """What one output of a run may use, of what the work has begun with as far as that goes."""
        if self._ahead is not None:
            self._ahead.give_back(num_tokens)
        return self.account.hold(num_tokens)

    def pass_turn(self) -> None:
        """Others have had theirs."""
        self.inline_size = 0

    def end(self) -> None:
        """Nothing more will run for it."""
        if self._ahead is not None:
            self._ahead.give_back()


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

    def who(self, scope: Scope) -> Who:
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


_WORK: ContextVar[ClientWork] = ContextVar("work")


def current_work() -> ClientWork:
    """The work that this task does; without an HTTP request, such as in tureen.Engine, work that has no limits."""
    return _WORK.get(None) or ClientWork(Account())


@contextlib.contextmanager
def serving(work: ClientWork) -> Iterator[None]:
    """It is the current work of this task and of those that it starts."""
    token = _WORK.set(work)
    try:
        yield
    finally:
        _WORK.reset(token)
        work.end()
