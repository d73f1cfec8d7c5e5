"""Runs work that would block the event loop in a few threads, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Event
from typing import ParamSpec, TypeVar

from tureen.clients.quotas import current_work
from tureen.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

INLINE_CHARS = 2048
"""Work that costs no more than tokenizing this many characters runs on the event loop, because handing it to a thread
costs as much. All work of one request in one turn of the event loop counts together."""

LARGE = INLINE_CHARS + 1
"""A size that always goes to a thread, for work whose size is not measured."""

NUM_THREADS = 2
"""Threads. Tokenizing releases the GIL; other work takes turns with the event loop, so there are few."""

MAX_WAITING = 1024
"""Maximum number of waiting pieces of work. Further requests are refused, because they would wait longer than clients
do."""


class Offload:
    """Runs work on the event loop or in a thread, by its size; in a thread it has the task's context variables.

    When the task is cancelled, work that has not begun never does, and work over many entries ends after the current
    entry.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "offload")
        self._num_waiting = 0

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Returns or raises what `work` does with these arguments. `size`: its cost, as characters of text to tokenize.
        Raises Unavailable when too much work waits."""
        [result] = await self.run_each(size, lambda _: work(*args, **options), (None,))
        return result

    async def run_each(self, size: int, work: Callable[[S], T], entries: Iterable[S]) -> list[T]:
        """Calls `work` for each entry in order and returns the results. `size`: the cost of all. Raises as `run`."""
        if _fits(size):
            return [work(entry) for entry in entries]
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable("too many large requests are waiting to be parsed; try again later", code="queue_full")
        has_left = Event()

        def each() -> list[T]:
            results = []
            for entry in entries:
                if has_left.is_set():
                    break
                results.append(work(entry))
            return results

        self._num_waiting += 1
        try:
            turn = self._threads.submit(copy_context().run, each)
        except RuntimeError:  # the pool keeps work whose thread did not start; has_left makes it end at once
            self._num_waiting -= 1
            has_left.set()
            raise Unavailable("the system could not start a thread to parse a large request; try again") from None
        try:
            return await asyncio.wrap_future(turn)
        finally:
            self._num_waiting -= 1
            has_left.set()


def _fits(size: int) -> bool:
    """Returns whether work may run on the event loop, given what it did for this request in the same turn."""
    if not size:
        return True
    work = current_work()
    if work.inline_size + size > INLINE_CHARS:
        return False
    if not work.inline_size:
        asyncio.get_running_loop().call_soon(work.pass_turn)  # runs in the next turn of the event loop
    work.inline_size += size
    return True


offload = Offload()
"""The only instance of this process; all its servers and engines share it."""
