"""Work of a request that would hold up the event loop, done by a few threads in the order in which it came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Event
from typing import TypeVar

from tureen.errors import Unavailable
from tureen.requests.quotas import current_work

T = TypeVar("T")
S = TypeVar("S")

INLINE_CHARS = 2048
"""Work that costs no more than tokenizing so much text is done on the event loop: handing it over costs as much. All
pieces of a request count together that it brings before others have had their turn."""

LARGE = INLINE_CHARS + 1
"""The size of what is not worth measuring."""

NUM_THREADS = 2
"""Tokenizing lets other threads run meanwhile; the rest takes turns with the event loop, with few others beside it."""

MAX_WAITING = 1024
"""Pieces of work. What comes then is refused: it would wait longer than clients do."""


class Offload:
    """Decides by the size of a piece of work where it is done; a thread has the context of the task.

    Whose task is cancelled waits for nothing: what has not begun never does, and what goes over many entries ends after
    the one at hand.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "offload")
        self._num_waiting = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises. `size`: characters of text, or what takes as long. Raises Unavailable."""
        [result] = await self.run_each(size, lambda _: work(), (None,))
        return result

    async def run_each(self, size: int, work: Callable[[S], T], entries: Iterable[S]) -> list[T]:
        """The same for each of some entries, of which `size` is the sum."""
        if _fits(size):
            return [work(entry) for entry in entries]
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable("too many large requests are waiting to be read; try again later", code="queue_full")
        has_left = Event()

        def each() -> list[T]:
            found = []
            for entry in entries:
                if has_left.is_set():
                    break
                found.append(work(entry))
            return found

        self._num_waiting += 1
        try:
            turn = self._threads.submit(copy_context().run, each)
        except RuntimeError:  # what the pool could not begin it keeps: it ends at once
            self._num_waiting -= 1
            has_left.set()
            raise Unavailable("the system starts no thread to read a large request; try again") from None
        try:
            return await asyncio.wrap_future(turn)
        finally:
            self._num_waiting -= 1
            has_left.set()


def _fits(size: int) -> bool:
    """Whether the event loop has time for it, beside what it did for this request in the same turn."""
    if not size:
        return True
    work = current_work()
    if work.inline_size + size > INLINE_CHARS:
        return False
    if not work.inline_size:
        asyncio.get_running_loop().call_soon(work.pass_turn)  # runs when the request lets go of the event loop
    work.inline_size += size
    return True


offload = Offload()
"""Of this process, whatever servers and engines are in it."""
