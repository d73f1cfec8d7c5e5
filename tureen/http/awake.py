"""Measures time during which this process could run: while it is stopped or starved of CPU, no client is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 1.0
"""Seconds between two readings of the clock. If more than twice this time has passed, the process did not run
meanwhile, and only twice this time counts."""


class AwakeTimer:
    """Calls `late` once after `seconds` in which this process could run, unless it is cancelled."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self.passed_s = 0.0
        self._seconds = seconds
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._looked_s = self._loop.time()
        self._begin()

    def cancel(self) -> None:
        """Stops the timer; `passed_s` is exact from then on."""
        self._timer.cancel()
        self._add()

    def _begin(self) -> None:
        self._timer = self._loop.call_later(min(LOOK_S, max(0.0, self._seconds - self.passed_s)), self._look)

    def _add(self) -> None:
        now_s = self._loop.time()
        self.passed_s += min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s = now_s

    def _look(self) -> None:
        self._add()
        if self.passed_s < self._seconds:
            self._begin()
        else:
            self._late()
