"""What a run tells those who stand around the dialects: whose tokens it uses, what it is called, whether it failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from starlette.types import Scope

from tureen.api.quotas import Account, Hold, Who


class Call:
    """One HTTP request, as far as it is no dialect's business."""

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
        """What one output of a run may use, of what the call has begun with as far as that goes."""
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


def who_calls(scope: Scope) -> Who:
    """Clients without a name are told apart by their address."""
    name = scope["client_name"]
    return ("name", name) if name else ("address", scope["client"][0] if scope["client"] else "")


_CALL: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """The one that this task works for; without one, such as in tureen.Engine, a call that has no limits."""
    return _CALL.get(None) or Call(Account())


@contextlib.contextmanager
def serving(call: Call) -> Iterator[None]:
    """It is the current call of this task and of those that it starts."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)
        call.end()
