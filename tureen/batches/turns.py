"""Shares what all batches need among the clients whose they are."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple


class WaitingTurn(NamedTuple):
    """Something that waits for its turn."""

    num_bytes: int
    has_turn: asyncio.Future[None]


class Share:
    """A client's part in what is held, and what it waits for, in its order."""

    def __init__(self, last_turn: int) -> None:
        self.num_held = 0
        self.last_turn = last_turn
        self.waiting: deque[WaitingTurn] = deque()


class Turns:
    """Limits what is held at once, by number and by bytes, but for a thing alone. The next turn is of the client that
    holds the fewest, among these of the one whose last turn is longest ago: many batches of one client take no more
    turns from others than one of it. Event-loop thread only."""

    def __init__(self, most: int, most_bytes: float = math.inf, *, most_of_client: int | None = None) -> None:
        """`most_of_client`: most that one client holds at once; None = all."""
        self._most = most
        self._most_bytes = most_bytes
        self._most_of_client = most if most_of_client is None else most_of_client
        self._num_held = 0
        self._num_bytes = 0
        self._num_turns = 0
        self._shares: dict[str, Share] = {}  # of clients that hold something, or wait

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn."""
        return sum(len(share.waiting) for share in self._shares.values())

    async def take(self, client: str, num_bytes: int = 0) -> None:
        """Waits for the client's turn to hold `num_bytes` bytes."""
        waiter = WaitingTurn(num_bytes, asyncio.get_running_loop().create_future())
        share = self._shares.setdefault(client, Share(self._num_turns))
        share.waiting.append(waiter)
        self._give()
        try:
            await waiter.has_turn
        except asyncio.CancelledError:
            if waiter.has_turn.cancelled():
                with contextlib.suppress(ValueError):  # its turn came meanwhile, and went to the next
                    share.waiting.remove(waiter)
                self._settle(client)
            else:
                self.free(client, num_bytes)
            raise

    def free(self, client: str, num_bytes: int = 0) -> None:
        """Ends a turn."""
        self._num_held -= 1
        self._num_bytes -= num_bytes
        self._shares[client].num_held -= 1
        self._settle(client)

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncGenerator[None, None]:
        """Returns a context that is a turn of the client."""
        await self.take(client)
        try:
            yield
        finally:
            self.free(client)

    def _settle(self, client: str) -> None:
        share = self._shares.get(client)
        if share is not None and not share.num_held and not share.waiting:
            del self._shares[client]
        self._give()

    def _give(self) -> None:
        """Gives turns while there is room; what is large is not overtaken for ever by what is small."""
        while True:
            waiting = [
                share for share in self._shares.values() if share.waiting and share.num_held < self._most_of_client
            ]
            if not waiting:
                return
            share = min(waiting, key=lambda share: (share.num_held, share.last_turn))
            if not self._has_room(share.waiting[0]):
                return
            waiter = share.waiting.popleft()
            if waiter.has_turn.cancelled():
                continue
            self._num_turns += 1
            share.last_turn = self._num_turns
            share.num_held += 1
            self._num_held += 1
            self._num_bytes += waiter.num_bytes
            waiter.has_turn.set_result(None)

    def _has_room(self, waiter: WaitingTurn) -> bool:
        is_full = self._num_held >= self._most or self._num_bytes + waiter.num_bytes > self._most_bytes
        return not (self._num_held and is_full)
