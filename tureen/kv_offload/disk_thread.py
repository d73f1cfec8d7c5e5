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


class DiskThread(threading.Thread):
    """Does jobs in order. A job calls `beat` whenever the disk has answered."""

    def __init__(self, name: str, *, lower_by: int = 0) -> None:
        """name: of the thread. lower_by: what its priority is lowered by."""
        super().__init__(name=name, daemon=True)
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._answered_s: float | None = None  # when the disk last answered its job; None where it has none
        self._has_told = False  # that the disk does not answer
        self._lower_by = lower_by
        self.start()

    def is_stuck(self) -> bool:
        """Says whether its job waits for a disk that does not answer. The log says so once."""
        answered_s = self._answered_s
        if answered_s is None or time.monotonic() - answered_s <= STUCK_S:
            return False
        if not self._has_told:
            self._has_told = True
            log.warning("the disk of --kv-disk does not answer (%s); prompts are computed until it does", self.name)
        return True

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

    def end(self, seconds: float) -> None:
        """Does the jobs that wait, for at most so long, and ends."""
        self._jobs.put(None)
        if not self.is_stuck():
            self.join(seconds)

    def run(self) -> None:
        """Does the jobs."""
        if self._lower_by:
            thread = threading.get_native_id()
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._lower_by)
        while (job := self._jobs.get()) is not None:
            self._answered_s = time.monotonic()
            try:
                job()
            except Exception:  # an edge: whoever gave the job is elsewhere
                log.exception("a job of the KV pages on the disk failed")
            self.note_answer()
            self._answered_s = None

    def note_answer(self) -> None:
        """Notes that the disk has answered."""
        self._answered_s = time.monotonic()
        if self._has_told:
            self._has_told = False
            log.warning("the disk of --kv-disk answers again (%s)", self.name)


def beat() -> None:
    """Hears from a job that the disk has answered."""
    thread = threading.current_thread()
    if isinstance(thread, DiskThread):
        thread.note_answer()
