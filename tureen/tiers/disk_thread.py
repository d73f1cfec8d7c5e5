"""Does what touches a disk in a thread of its own, and tells when the disk has stopped answering."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from tureen.log import get_logger

STUCK_S = 5.0
"""A disk that has not answered for so long is not waited for. One of a network may never answer again."""

log = get_logger("kv-disk")


class DiskThread:
    """Does jobs in order. A job that touches the disk several times calls `beat` in between."""

    def __init__(self, name: str, *, lower_by: int = 0) -> None:
        """name: of the thread. lower_by: what its priority is lowered by."""
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._alive_s: float | None = None  # when its job last went on; None where it has none
        self._lower_by = lower_by
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether its job waits for a disk that does not answer."""
        alive_s = self._alive_s
        return alive_s is not None and time.monotonic() - alive_s > STUCK_S

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return self._jobs.qsize()

    def give(self, job: Callable[[], object]) -> None:
        """Has a job done after those that wait."""
        self._jobs.put(job)

    def mark(self) -> threading.Event:
        """Returns what is set once all jobs that were given so far are done."""
        done = threading.Event()
        self._jobs.put(done.set)
        return done

    def beat(self) -> None:
        """Hears from the job that it goes on."""
        self._alive_s = time.monotonic()

    def close(self, seconds: float) -> None:
        """Does the jobs that wait, for at most so long, and ends."""
        self._jobs.put(None)
        if not self.is_stuck:
            self._thread.join(seconds)

    def _run(self) -> None:
        if self._lower_by:
            thread = threading.get_native_id()
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._lower_by)
        while (job := self._jobs.get()) is not None:
            self.beat()
            try:
                job()
            except Exception:  # an edge: whoever gave the job is elsewhere
                log.exception("a job of the KV pages on the disk failed")
            self._alive_s = None
