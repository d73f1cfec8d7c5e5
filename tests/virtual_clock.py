"""A clock that moves only when no task is ready, and an event loop on that clock.

Product code reads `time.monotonic` in many places, so `running` replaces it while a loop runs, and `time.sleep`. It
also does work for a thread in the call that submits it. So the order of events in a test is always the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

START_S = 1000.0
TURN_S = 1e-8
"""A turn of the loop takes that long: so a task that looks again and again does not stop the clock for others."""

LONGEST_WAIT_S = 180.0
"""Of virtual time, for `VirtualLoop.when`."""

LONGEST_RUN_S = 100_000.0
"""Of virtual time between two events from outside: a test that waits for longer waits for ever."""


class Stuck(AssertionError):
    """Something waits for what will never come."""


class Clock:
    """Seconds that pass when a loop or a sleep says so."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.wall_offset_s = 1.7e9  # of the time of day, which may also go back

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + self.wall_offset_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time all but stands still while there is work, and then jumps to the next timer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._awaited: list[tuple[Callable[[], object], asyncio.Future[None]]] = []
        super().__init__(_Jumps(clock))

    def time(self) -> float:
        return self.clock.now_s

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(done_now(func, *args), loop=self)

    async def when(self, condition: Callable[[], object], what: object = "what was waited for") -> None:
        """Return after the first turn of the loop that makes the condition true."""
        if condition():
            return
        found: asyncio.Future[None] = self.create_future()
        self._awaited.append((condition, found))
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                await found
        except TimeoutError:
            raise AssertionError(f"{what} did not happen within {LONGEST_WAIT_S} s") from None
        finally:
            self._awaited.remove((condition, found))

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        for condition, found in self._awaited:
            if not found.done() and condition():
                found.set_result(None)


class _Jumps(selectors.DefaultSelector):
    """Where nothing is ready, the time of the next timer is now."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._limit_s = clock.now_s + LONGEST_RUN_S

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Stuck("nothing is ready and no timer runs")
        if ready:
            self._limit_s = self._clock.now_s + LONGEST_RUN_S
        self._clock.now_s += TURN_S if ready else max(timeout or 0.0, TURN_S)
        if self._clock.now_s > self._limit_s:
            raise Stuck("timers run, and nothing else happens")
        return ready


class Elsewhere:
    """Marks work that another thread does in a real server, for tests that count the event loop's."""

    depth = 0

    def __enter__(self) -> None:
        Elsewhere.depth += 1

    def __exit__(self, *_: object) -> None:
        Elsewhere.depth -= 1


def done_now(func: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Return what an executor's `submit` does, with the work done."""
    future: Future[Any] = Future()
    try:
        with Elsewhere():
            result = func(*args, **options)
    except BaseException as error:  # noqa: BLE001 - as in a thread: the waiter gets it
        future.set_exception(error)
    else:
        future.set_result(result)
    return future


def _submit(pool: ThreadPoolExecutor, func: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
    if pool._shutdown:
        raise RuntimeError("cannot schedule new futures after shutdown")
    return done_now(func, *args, **options)


@contextlib.contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Give owners' attributes other values: as `mock.patch.object` does, at less cost for each request of a test."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def running(clock: Clock) -> contextlib.AbstractContextManager[None]:
    """Give this clock to code that asks for the time, sleeps, or submits work to a thread."""
    return replaced(
        (time, "monotonic", clock.monotonic), (time, "sleep", clock.sleep), (ThreadPoolExecutor, "submit", _submit)
    )
