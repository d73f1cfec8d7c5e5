"""Gathers the tokens of streams into fewer events while this process is busy (`--stream-interval auto`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.25
"""Seconds between two looks at how busy the thread is."""

BUSY, CALM = 0.7, 0.35
"""Shares of the time in which the thread computes, or waits for a processor: above the first it is busy, below the
second it is not any more. Gathered events cost about half."""

GATHER_S = 0.03
"""Seconds in which tokens are gathered for one event."""

SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Gathering:
    """Says whether streams are to gather tokens, and wakes those that do, all at once. Event-loop thread only."""

    def __init__(self) -> None:
        self.is_busy = False
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_asked = False  # by a stream since the last look
        self._before_s = self._before_busy_s = 0.0

    def is_wanted(self) -> bool:
        """Says whether a stream is to gather. As long as streams ask, it looks at how busy this thread is."""
        self.begin()
        return self.is_busy

    def begin(self) -> None:
        """Begins to look at how busy this thread is, until no stream asks any more."""
        self._is_asked = True
        if self._timer is None:
            self._before_s, self._before_busy_s = time.monotonic(), _busy_s()
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def judge(self, share: float) -> None:
        """Notes the share of the last time in which the thread had work."""
        self.is_busy = share > (CALM if self.is_busy else BUSY)

    def put_off(self, wake: Callable[[], None]) -> None:
        """Calls `wake` with all others when the tokens of GATHER_S have come in."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(GATHER_S, self._wake_all)
        self._waiting.append(wake)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def _look(self) -> None:
        if not self._is_asked:
            self._timer, self.is_busy = None, False
            return
        self._is_asked = False
        now_s, busy_s = time.monotonic(), _busy_s()
        self.judge((busy_s - self._before_busy_s) / (now_s - self._before_s))
        self._before_s, self._before_busy_s = now_s, busy_s
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)


def _busy_s() -> float:
    """Returns the seconds in which this thread has computed, or waited for a processor where the kernel tells."""
    with contextlib.suppress(OSError, ValueError):
        computed_ns, waited_ns, _ = SCHEDSTAT.read_text().split()
        return (int(computed_ns) + int(waited_ns)) / 1e9
    return time.thread_time()
