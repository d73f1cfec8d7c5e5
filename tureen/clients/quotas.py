"""Limits each client's tokens per minute, with a token bucket, and its concurrent requests."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import msgspec

from tureen.clients.keys import NO_LIMITS, Limits
from tureen.config import Config
from tureen.errors import TooManyRequests

MINUTE_S = 60.0

ClientId = tuple[str, str]
"""A client: ("name", its name), or ("address", its IP address)."""


class Tally(msgspec.Struct):
    """The use of one client: its finished requests, the failed ones among them, and their tokens."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Account:
    """The token bucket of one client.

    A running request reserves the maximum number of tokens that it may use, prompt and output, until it uses them or
    ends. If other requests of the client run, a new one must fit into the remaining tokens. If none runs, the new one
    may begin with any maximum unless the client is in debt, so only such a request can cause debt.
    """

    def __init__(
        self, limits: Limits = NO_LIMITS, clock: Callable[[], float] = time.monotonic, tally: Tally | None = None
    ) -> None:
        self.tally = tally or Tally()  # clients without a name share one
        self.charged = 0  # total tokens taken out of the bucket
        self.num_visitors = 0  # the client's running HTTP requests
        self._num_held = 0  # tokens that running requests may still use
        self._limits = limits
        self._clock = clock
        self._used = 0.0  # used tokens that the bucket has not regained yet
        self._since_s = clock()
        self._num_running = 0
        self._mean_s: float | None = None  # moving average of the duration of its requests

    @property
    def limits(self) -> Limits:
        """The client's limits. Setting them first regains tokens at the old rate."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._regain()
        self._limits = limits

    @property
    def is_unused(self) -> bool:
        """Whether the account can be dropped: the client has no running request, and its bucket is full."""
        self._regain()
        return not (self.num_visitors or self._num_running or self._num_held or self._used)

    def check(self, num_tokens: int) -> None:
        """Raises TooManyRequests if a request that may use `num_tokens` cannot begin now."""
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        self._regain()
        remaining = per_minute - self._used - self._num_held
        if remaining >= (min(num_tokens, per_minute) if self._num_held else 0):
            return
        debt = math.ceil(self._used) - per_minute
        wait_s = math.ceil((self._used - per_minute) / per_minute * MINUTE_S)
        if self._num_held:
            wait_s = max(wait_s, self._turn_s())
        reason = (
            f"has {max(0, math.floor(remaining))} of its {per_minute} tokens a minute left, after what its running "
            f"requests may use; this one may use {num_tokens}; ask for fewer, or retry when a request has finished, "
            "in about"
            if self._num_held
            else f"has used its {per_minute} tokens a minute and {debt} more; retry in"
        )
        raise TooManyRequests(f"this client {reason} {wait_s} s", code="tokens_per_minute", retry_after_s=wait_s)

    def charge(self, num_tokens: int) -> None:
        """Takes used tokens out of the bucket."""
        if self._limits.tokens_per_minute is None:
            return
        self._regain()
        self._used += num_tokens
        self.charged += num_tokens

    @property
    def used(self) -> float:
        """The tokens that the bucket lacks now."""
        self._regain()
        return self._used

    def restore(self, used: float, seconds_ago: float) -> None:
        """Restores a bucket that lacked `used` tokens some seconds ago."""
        self._used, self._since_s = used, self._clock() - seconds_ago

    def hold(self, num_tokens: int) -> Hold:
        """Reserves tokens that a request may use, until the returned Hold gives them back."""
        self._num_held += num_tokens
        return Hold(self, num_tokens)

    def release(self, num_tokens: int) -> None:
        """Releases reserved tokens."""
        self._num_held -= num_tokens

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers x-ratelimit-{limit,remaining,reset}-tokens; none for a client without a limit.

        Source: https://platform.openai.com/docs/guides/rate-limits
        """
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
    def running(self, *, beside: int = 0) -> Iterator[None]:
        """Counts a running request inside the block. `beside`: running requests that are part of the same work. Raises
        TooManyRequests if the client has reached its limit."""
        max_requests = self._limits.max_requests
        if max_requests is not None and self._num_running - beside >= max_requests:
            raise TooManyRequests(
                f"this client has {max_requests} requests running, the most that it may have; wait until one finishes",
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
        """Returns the estimated seconds until one of the client's requests ends, from their mean duration; at least
        1."""
        return max(1, math.ceil((self._mean_s or 0.0) / max(1, self._num_running)))

    def _regain(self) -> None:
        """Refills the bucket for the time that has passed."""
        now_s, per_minute = self._clock(), self._limits.tokens_per_minute
        regained = math.inf if per_minute is None else (now_s - self._since_s) / MINUTE_S * per_minute
        self._used = max(0.0, self._used - regained)
        self._since_s = now_s


class Hold:
    """Tokens of an account that are reserved until they are used or released."""

    def __init__(self, account: Account, num_tokens: int) -> None:
        self._account = account
        self._num_left = num_tokens

    def pay(self, num_tokens: int) -> None:
        """Charges the account for used tokens, and releases the same number of reserved tokens if enough are left."""
        self.give_back(num_tokens)
        self._account.charge(num_tokens)

    def give_back(self, num_tokens: int | None = None) -> None:
        """Releases reserved tokens that will not be used; None = all of them."""
        num_tokens = self._num_left if num_tokens is None else min(num_tokens, self._num_left)
        self._num_left -= num_tokens
        self._account.release(num_tokens)


class Quotas:
    """The accounts of all recent clients. Event-loop thread only."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._accounts: dict[ClientId, Account] = {}
        self.tallies: dict[str, Tally] = {}  # by the names of clients; "" = all without one
        self.restored: dict[ClientId, Callable[[Account], None]] = {}
        """Functions that restore the account of a client after a restart."""

    @property
    def accounts(self) -> Mapping[ClientId, Account]:
        """The accounts by their clients."""
        return self._accounts

    def __len__(self) -> int:
        return len(self._accounts)

    @contextlib.contextmanager
    def visit(self, client_id: ClientId, key_limits: Limits) -> Iterator[Account]:
        """Yields the account of a client while one of its HTTP requests is served. `key_limits`: the limits of its API
        key, which take precedence over the settings."""
        most_tokens = key_limits.tokens_per_minute or self._config.client_tokens_per_minute
        limits = Limits(most_tokens, key_limits.max_requests or self._config.max_client_requests, key_limits.weight)
        account = self._accounts.get(client_id)
        if account is None:
            kind, name = client_id
            tally = self.tallies.setdefault(name if kind == "name" else "", Tally())
            account = self._accounts[client_id] = Account(limits, self._clock, tally)
            if client_id in self.restored:
                self.restored.pop(client_id)(account)
        account.limits = limits
        account.num_visitors += 1
        try:
            yield account
        finally:
            account.num_visitors -= 1

    def sweep(self) -> None:
        """Drops unused accounts."""
        for client_id in [client_id for client_id, account in self._accounts.items() if account.is_unused]:
            del self._accounts[client_id]


class ClientWork:
    """The work for one HTTP request: the account that it is charged to, its names, its size, and whether it failed."""

    def __init__(self, account: Account, *, when_idle: bool = False) -> None:
        """`when_idle`: all of it runs only while no other request does."""
        self.account = account
        self.when_idle = when_idle
        self.names: set[str] = set()  # names with which the client may abort its requests
        self.has_failed = False
        self.num_tokens = 0  # of all outputs, so far
        self.prompt_tokens = 0  # of all outputs that have ended; of those ...
        self.cached_tokens = 0  # ... found in the prefix cache
        self.first_token_s: float | None = None  # from its arrival to the first token of any output
        self.trace: Any = None  # a RequestTrace (generation.py); None: it is not recorded
        self.load_wait_s = 0.0  # seconds that the request waited for its model to be loaded
        self.inline_size = 0  # cost of the work done on the event loop in this turn (offload.py)
        self._ahead: Hold | None = None  # tokens reserved for runs that have not begun

    def begin(self, num_tokens: int) -> None:
        """Reserves the tokens that all runs of this request may use. Only the first call reserves, so a request that
        has begun is not refused later.

        Raises TooManyRequests if the client has too few tokens left.
        """
        if self._ahead is None:
            self.account.check(num_tokens)
            self._ahead = self.account.hold(num_tokens)

    def begin_outputs(self, max_tokens: Mapping[int, int]) -> dict[int, Hold]:
        """Begins the outputs of one run: reserves the tokens that each may use, first out of those that `begin`
        reserved. Raises as `begin`."""
        num_tokens = sum(max_tokens.values())
        self.begin(num_tokens)
        if self._ahead is not None:
            self._ahead.give_back(num_tokens)
        return {index: self.account.hold(most) for index, most in max_tokens.items()}

    def pass_turn(self) -> None:
        """Starts a new turn of the event loop: resets the cost of work done in the last one."""
        self.inline_size = 0

    def end(self) -> None:
        """Releases the tokens reserved for runs that did not begin."""
        if self._ahead is not None:
            self._ahead.give_back()


_WORK: ContextVar[ClientWork] = ContextVar("work")
_UNLIMITED = Account()


def current_work() -> ClientWork:
    """Returns the work of the HTTP request that this task serves. Without a request, as in tureen.Engine, returns work
    without limits."""
    return _WORK.get(None) or ClientWork(_UNLIMITED)


@contextlib.contextmanager
def serving(work: ClientWork) -> Iterator[None]:
    """Makes `work` the current work of this task and of tasks started inside the block. Ends it afterwards."""
    token = _WORK.set(work)
    try:
        yield
    finally:
        _WORK.reset(token)
        work.end()
