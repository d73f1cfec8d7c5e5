"""Charges clients for the time that steps waited for their code, whatever code they send."""

from __future__ import annotations

import math
from collections.abc import Callable

from tureen.errors import TooManyRequests

LIMIT_S = 2.0
"""Seconds of waiting that a client may owe. Beyond, its processors are refused until half of it is paid."""

PAID_PER_S = 0.1
"""Seconds of its debt that a client pays in each second: its code may always take a tenth of others' time."""

SUSPENDED_S = 60.0
"""Seconds for which a client's code is refused after some of it did not return."""

MAX_ENDS = 3
"""Number of ends from outside, within SUSPENDED_S, after which a client's code is suspected to cause them."""

LONGEST_REST_S = 5.0
MAX_CLIENTS = 4096


class ClientCharges:
    """The account of one client."""

    def __init__(self, now_s: float) -> None:
        self.debt_s = 0.0
        self.paid_until_s = now_s
        self.rests_until_s = -math.inf
        self.suspended_until_s = -math.inf
        self.why = ""
        self.ends_s: list[float] = []  # when its processes were ended from outside


class Charges:
    """Accounts of the clients whose code made others wait. Any thread may call it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, ClientCharges] = {}

    def add(self, client: str, seconds: float) -> None:
        """Notes that others waited so long: the client's requests that use code sit out as long, and it owes the
        time."""
        now_s = self._clock()
        account = self._account(client, now_s)
        account.debt_s = self._debt(account, now_s) + seconds
        account.paid_until_s = now_s
        account.rests_until_s = now_s + min(LONGEST_REST_S, seconds)
        if account.debt_s > LIMIT_S:
            until_s = now_s + (account.debt_s - LIMIT_S / 2) / PAID_PER_S
            self._suspend(account, until_s, f"it made others wait for {account.debt_s:.1f} s lately")

    def suspend(self, client: str, why: str) -> None:
        """Refuses a client's code for SUSPENDED_S; `why` is for the error."""
        now_s = self._clock()
        self._suspend(self._account(client, now_s), now_s + SUSPENDED_S, why)

    def note_end(self, client: str) -> None:
        """Notes that a process of the client's code was ended from outside; MAX_ENDS of them suspend the client."""
        now_s = self._clock()
        account = self._account(client, now_s)
        account.ends_s = [end_s for end_s in account.ends_s if end_s > now_s - SUSPENDED_S] + [now_s]
        if len(account.ends_s) >= MAX_ENDS:
            self._suspend(account, now_s + SUSPENDED_S, f"{MAX_ENDS} of its processes were recently killed")

    def is_resting(self, client: str) -> bool:
        """Says whether the client's requests that use code sit out this step."""
        account = self._accounts.get(client)
        return account is not None and account.rests_until_s > self._clock()

    def check(self, client: str) -> None:
        """Raises TooManyRequests for a client that is suspended."""
        account = self._accounts.get(client)
        left_s = 0.0 if account is None else account.suspended_until_s - self._clock()
        if account is not None and left_s > 0:
            retry_after_s = math.ceil(left_s)
            raise TooManyRequests(
                f"custom_logit_processor: code of this client is refused for {retry_after_s} s: {account.why}",
                field="custom_logit_processor",
                code="custom_logit_processor_suspended",
                retry_after_s=retry_after_s,
            )

    def _account(self, client: str, now_s: float) -> ClientCharges:
        account = self._accounts.pop(client, None) or ClientCharges(now_s)
        self._accounts[client] = account
        while len(self._accounts) > MAX_CLIENTS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _debt(self, account: ClientCharges, now_s: float) -> float:
        return max(0.0, account.debt_s - PAID_PER_S * (now_s - account.paid_until_s))

    def _suspend(self, account: ClientCharges, until_s: float, why: str) -> None:
        account.suspended_until_s = max(account.suspended_until_s, until_s)
        account.why = why
