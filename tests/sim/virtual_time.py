"""An event loop whose time is a number and whose order of work is drawn from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

START_S = 1000.0
MAX_TURNS = 50_000
"""Of an event loop: more than any simulation needs, so that one that goes round in circles ends."""


class Stuck(AssertionError):
    """Somebody waits for what will never come."""


class Clock:
    """Seconds that pass when the simulation says so."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.wall_offset_s = 1.7e9  # of the time of day, which may also go back

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + self.wall_offset_s


class _Order(deque):
    """What is ready. `draw` says which of so many comes next."""

    draw: Callable[[int], int]

    def popleft(self) -> Any:
        index = self.draw(len(self))
        if not index:
            return super().popleft()
        self.rotate(-index)
        found = super().popleft()
        self.rotate(index)
        return found


class _Jumps:
    """Stands for the selector: where nothing is ready, the time of the next timer is now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_turns = 0

    def select(self, timeout: float | None) -> list[object]:
        self._num_turns += 1
        if timeout is None:
            raise Stuck("nothing is ready and no timer runs")
        if self._num_turns > MAX_TURNS:
            raise Stuck("the simulation goes round in circles")
        self._clock.now_s += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """One thread, no sockets; threads' work is done at once, and heard of at a time of its own."""

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        super().__init__()
        self.clock = clock
        self.chance = chance
        self.trace: list[str] = []
        self._clock_resolution = 1e-9
        self._selector = _Jumps(clock)
        self._ready = _Order()
        is_fair = chance.random() < 0.2  # some seeds have the usual order
        self._ready.draw = lambda count: 0 if is_fair or count < 2 else chance.randrange(count)

    def time(self) -> float:
        return self.clock.now_s

    def note(self, what: str) -> None:
        self.trace.append(f"{self.clock.now_s - START_S:10.4f} {what}")

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            value = func(*args)
        except Exception as error:  # noqa: BLE001 - it is who waits for the thread that gets it
            end = future.set_exception, error
        else:
            end = future.set_result, value
        self.call_later(self.chance.random() * 0.1, lambda: future.done() or end[0](end[1]))
        return future

    def _process_events(self, event_list: list[object]) -> None:
        """There are none: nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""


@contextlib.contextmanager
def virtual_time(clock: Clock, chance: random.Random) -> Iterator[None]:
    """Whoever asks for the time, or for something that is random, gets the simulation's."""
    with (
        mock.patch.object(time, "monotonic", clock.monotonic),
        mock.patch.object(time, "time", clock.time),
        mock.patch.object(uuid, "uuid4", side_effect=lambda: uuid.UUID(int=chance.getrandbits(128))),
        mock.patch.object(secrets, "randbits", chance.getrandbits),
        mock.patch.object(secrets, "token_hex", lambda count: chance.randbytes(count).hex()),
    ):
        yield
