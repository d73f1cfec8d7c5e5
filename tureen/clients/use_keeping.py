"""Writes the clients' use to the file of --usage-db once a second, and loads it at the start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

import msgspec

from tureen.clients.quotas import Account, Quotas, Tally
from tureen.errors import TureenError
from tureen.storage.usage import Bucket, UsageFile

INTERVAL_S = 1.0
RETRY_S = 30.0
"""Seconds between two writes, and after a failed one. Unwritten use is added up meanwhile."""


class UseKeeper:
    """A service that keeps the use of a server's clients. Event-loop thread only."""

    def __init__(self, quotas: Quotas, path: str, clock: Callable[[], float] = time.time) -> None:
        """Raises StartupError."""
        self._quotas = quotas
        self._clock = clock
        self._file = UsageFile(path)
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held during a write
        self._charged: dict[tuple[str, str], int] = {}  # of each account, as written
        totals, buckets = self._file.read()
        quotas.tallies.update({client: Tally(*values) for client, values in totals.items()})
        self._written = {client: Tally(*values) for client, values in totals.items()}
        for bucket in buckets:
            quotas.restored[bucket.kind, bucket.client] = partial(self._restore, bucket)

    def start(self) -> None:
        """Begins to write."""
        self._task = asyncio.create_task(self._keep())

    def drain(self) -> None:
        """Does nothing, because requests still end."""

    async def close(self) -> None:
        """Writes the remaining use, and closes the file."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(TureenError):  # the storage has logged it
            await self.flush()
        self._file.close()

    @property
    def num_unwritten(self) -> int:
        """Number of ended requests that are not on the disk yet."""
        return sum(tally.requests - self._before(client).requests for client, tally in self._quotas.tallies.items())

    async def flush(self) -> None:
        """Writes all changes to the disk. Continues if the caller is cancelled, so that written changes are also
        recorded as written. Raises TureenError."""
        await asyncio.shield(asyncio.ensure_future(self._write()))

    async def _write(self) -> None:
        async with self._turn:
            await self._write_changes()

    async def _write_changes(self) -> None:
        now_s = self._clock()
        newest = {client: msgspec.structs.replace(tally) for client, tally in self._quotas.tallies.items()}
        uses = {client: _more(tally, self._before(client)) for client, tally in newest.items()}
        uses = {client: values for client, values in uses.items() if any(values)}
        charged = {client_id: account.charged for client_id, account in self._quotas.accounts.items()}
        changed = [client_id for client_id, total in charged.items() if total != self._charged.get(client_id, 0)]
        if not uses and not changed:
            return
        buckets = [Bucket(*client_id, self._quotas.accounts[client_id].used, now_s) for client_id in changed]
        day = time.strftime("%Y-%m-%d", time.gmtime(now_s))
        await self._file.add(day, uses, buckets, now_s)
        self._written, self._charged = newest, charged

    async def days(self) -> list[tuple[str, str, *tuple[int, ...]]]:
        """Returns the use of each client and day, up to now. Raises TureenError."""
        await self.flush()
        return await self._file.days()

    def _before(self, client: str) -> Tally:
        return self._written.get(client, _NONE)

    def _restore(self, bucket: Bucket, account: Account) -> None:
        account.restore(bucket.used, max(0.0, self._clock() - bucket.at_s))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.flush()
            except TureenError:  # the storage has logged it
                await asyncio.sleep(RETRY_S)


_NONE = Tally()


def _more(now: Tally, before: Tally) -> tuple[int, ...]:
    """Returns the increase of each count."""
    return tuple(
        new - old for new, old in zip(msgspec.structs.astuple(now), msgspec.structs.astuple(before), strict=True)
    )
