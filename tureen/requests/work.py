"""What runs for one HTTP request: whose tokens it uses, what it is called, whether it failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from tureen.requests.quotas import Account, Hold


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
