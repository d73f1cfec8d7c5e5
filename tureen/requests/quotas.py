"""What each client may use: tokens a minute, requests at once. A bucket that every token empties and time fills."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from tureen.config import Config
from tureen.errors import TooManyRequests
from tureen.requests.keys import NO_LIMITS, Limits

MINUTE_S = 60.0

Who = tuple[str, str]
"""A client: ("name", its name), or ("address", the one it comes from)."""


class Account:
    """What one client has used, and what its requests that run may still use: each holds its prompt and the most that
    it may answer until that is used, or the request ends. What begins beside others must fit into what is left. Alone
    a request may begin unless the client is in debt, however much it may use: only that one can bring debt."""

    def __init__(self, limits: Limits = NO_LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_visitors = 0  # of its HTTP requests
        self._num_held = 0  # tokens that what runs has not used yet
        self._limits = limits
        self._clock = clock
        self._used = 0.0  # tokens that time has not given back yet
        self._since_s = clock()
        self._num_running = 0
        self._mean_s: float | None = None  # how long its requests take, the newest counting most

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._regain()
        self._limits = limits

    @property
    def is_unused(self) -> bool:
        """Nobody is here, nothing runs, and nothing is to be remembered."""
        self._regain()
        return not (self.num_visitors or self._num_running or self._num_held or self._used)

    def check(self, num_tokens: int) -> None:
        """Raises TooManyRequests for a request of so many tokens that may not begin now."""
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        self._regain()
        left = per_minute - self._used - self._num_held
        if left >= (min(num_tokens, per_minute) if self._num_held else 0):
            return
        debt = math.ceil(self._used) - per_minute
        wait_s = math.ceil((self._used - per_minute) / per_minute * MINUTE_S)
        if self._num_held:
            wait_s = max(wait_s, self._turn_s())
        what = (
            f"has {max(0, math.floor(left))} of its {per_minute} tokens a minute left beside what its running requests "
            f"may use, and this one may use {num_tokens}; ask for fewer, or send it again when one has ended, in about"
            if self._num_held
            else f"has used its {per_minute} tokens a minute and {debt} more; send the request again in"
        )
        raise TooManyRequests(f"this client {what} {wait_s} s", code="tokens_per_minute", retry_after_s=wait_s)

    def charge(self, num_tokens: int) -> None:
        """So many tokens were used."""
        if self._limits.tokens_per_minute is None:
            return
        self._regain()
        self._used += num_tokens

    def hold(self, num_tokens: int) -> Hold:
        """So many tokens may be used."""
        self._num_held += num_tokens
        return Hold(self, num_tokens)

    def let_go(self, num_tokens: int) -> None:
        """Of those that are held."""
        self._num_held -= num_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's, where there is a limit: what is left of it, and when all of it will be."""
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return []
        self._regain()
        used = self._used + self._num_held
        minutes, seconds = divmod(math.ceil(used / per_minute * MINUTE_S), 60)
        values = {
            "limit": str(per_minute),
            "remaining": str(max(0, math.floor(per_minute - used))),
            "reset": f"{minutes}m{seconds}s" if minutes else f"{seconds}s",
        }
        return [(f"x-ratelimit-{name}-tokens".encode(), value.encode()) for name, value in values.items()]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """One more request of this client. Raises TooManyRequests when it has enough."""
        most = self._limits.max_requests
        if most is not None and self._num_running >= most:
            raise TooManyRequests(
                f"this client has {most} requests running, the most it may; wait until one has ended",
                retry_after_s=self._turn_s(),
            )
        self._num_running += 1
        started_s = self._clock()
        try:
            yield
        finally:
            self._num_running -= 1
            seconds = self._clock() - started_s
            self._mean_s = seconds if self._mean_s is None else 0.8 * self._mean_s + 0.2 * seconds

    def _turn_s(self) -> int:
        """Until one of its requests ends, as they took lately; at least 1."""
        return max(1, math.ceil((self._mean_s or 0.0) / max(1, self._num_running)))

    def _regain(self) -> None:
        now_s, per_minute = self._clock(), self._limits.tokens_per_minute
        regained = math.inf if per_minute is None else (now_s - self._since_s) / MINUTE_S * per_minute
        self._used = max(0.0, self._used - regained)
        self._since_s = now_s


class Hold:
    """Tokens that are held against a client until they are used or given back."""

    def __init__(self, account: Account, num_tokens: int) -> None:
        self._account = account
        self._num_left = num_tokens

    def pay(self, num_tokens: int) -> None:
        """So many tokens were used, of these as far as there are so many."""
        self.give_back(num_tokens)
        self._account.charge(num_tokens)

    def give_back(self, num_tokens: int | None = None) -> None:
        """So many will not be used, None = all that are left; no more than those."""
        num_tokens = self._num_left if num_tokens is None else min(num_tokens, self._num_left)
        self._num_left -= num_tokens
        self._account.let_go(num_tokens)


class Quotas:
    """The accounts of all clients that were here lately. Event-loop thread only."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._accounts: dict[Who, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @contextlib.contextmanager
    def visit(self, who: Who, own: Limits) -> Iterator[Account]:
        """The account of a client that sends a request. `own` limits, of its key, go before those of the settings."""
        most_tokens = own.tokens_per_minute or self._config.client_tokens_per_minute
        limits = Limits(most_tokens, own.max_requests or self._config.max_client_requests, own.weight)
        account = self._accounts.get(who)
        if account is None:
            account = self._accounts[who] = Account(limits, self._clock)
        account.limits = limits
        account.num_visitors += 1
        try:
            yield account
        finally:
            account.num_visitors -= 1

    def sweep(self) -> None:
        """Forget who has used nothing that still counts."""
        for who in [who for who, account in self._accounts.items() if account.is_unused]:
            del self._accounts[who]


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
