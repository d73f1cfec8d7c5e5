"""What a run tells those who stand around the dialects: whose tokens it uses, what it is called, whether it failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from starlette.types import Scope

from tureen.api.quotas import Account, Who


class Call:
    """One HTTP request, as far as it is no dialect's business."""

    def __init__(self, account: Account) -> None:
        self.account = account  # who pays
        self.names: set[str] = set()  # what the client calls what runs for it
        self.has_failed = False


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
