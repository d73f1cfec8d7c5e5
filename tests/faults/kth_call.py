"""The k-th call of a function fails: for each place of the server that the system may say no to."""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import contextlib
import errno
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from timeouts import wait_until

import tureen

HOME = str(Path(tureen.__file__).parent)
MOST = 100
"""Calls of one kind in one workload; more would never end."""

LOOKS = ("is_stopped", "_anonymous_bytes")
"""Functions that look at processes as time goes by: there would always be one more call."""

STARTING = "start-children"
"""The thread that starts all children; it lives as long as the process (sandbox/child_process.py)."""

NEAR = 6  # frames: further out, the call is not the server's own


class Site(NamedTuple):
    """A function that may fail, and how."""

    owner: Any
    name: str
    error: Callable[[], BaseException]

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


def no_more(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, os.strerror(number))


SITES = (
    Site(subprocess, "Popen", no_more(errno.ENOMEM)),
    Site(socket, "socketpair", no_more(errno.EMFILE)),
    Site(socket, "send_fds", no_more(errno.ENOBUFS)),
    Site(os, "memfd_create", no_more(errno.EMFILE)),
    Site(os, "ftruncate", no_more(errno.ENOSPC)),
    Site(os, "pidfd_open", no_more(errno.EMFILE)),
    Site(os, "pipe", no_more(errno.EMFILE)),
    Site(os, "open", no_more(errno.EMFILE)),
    Site(os, "write", no_more(errno.ENOSPC)),
    Site(os, "dup", no_more(errno.EMFILE)),
    Site(builtins, "open", no_more(errno.EMFILE)),
    Site(mmap, "mmap", no_more(errno.ENOMEM)),
    Site(threading.Thread, "start", lambda: RuntimeError("can't start new thread")),
)


class Failing:
    """Counts the server's calls of a site; `has_failed` once the k-th came."""

    def __init__(self, site: Site, k: int) -> None:
        self._site = site
        self._k = k
        self._lock = threading.Lock()
        self.count = 0

    @property
    def has_failed(self) -> bool:
        return self.count >= self._k

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        real = getattr(self._site.owner, self._site.name)

        def call(*args: Any, **more: Any) -> Any:
            if _is_ours(sys._getframe(1)):
                with self._lock:
                    self.count += 1
                    is_it = self.count == self._k
                if is_it:
                    raise self._site.error()
            return real(*args, **more)

        with mock.patch.object(self._site.owner, self._site.name, call):
            yield


def each_failure(site: Site, work: Callable[[Failing], None], most: int = MOST, step: int = 1) -> None:
    """Do `work(failing)` for k = 1, 2, 2 + step, …, until the k-th call is not reached."""
    for k in (1, *range(2, most, step)):
        failing = Failing(site, k)
        work(failing)
        if not failing.has_failed:
            return
    raise AssertionError(f"{site} is called more than {most} times")


def _is_ours(frame: Any) -> bool:
    if frame.f_code.co_name in LOOKS:
        return False
    for _ in range(NEAR):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(HOME):
            return True
        frame = frame.f_back
    return False


def held() -> Counter[str]:
    """What this process has open, by kind, and its threads.

    A pool counts as one thread: how many of those it may have are started depends on how soon each gets free.
    """
    gc.collect()
    queues = concurrent.futures.thread._threads_queues.copy()
    threads = [thread for thread in threading.enumerate() if thread.name != STARTING]
    found = Counter(thread=len({id(queues.get(thread, thread)) for thread in threads}))
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[os.readlink(f"/proc/self/fd/{entry}").split(":")[0]] += 1
    return found


def assert_nothing_left(before: Counter[str]) -> None:
    """Wait until no more is held than before. Less is no fault: what an earlier test left may end meanwhile."""
    try:
        wait_until(lambda: not held() - before)
    except AssertionError:
        threads = sorted(thread.name for thread in threading.enumerate())
        raise AssertionError(f"begun and not ended: {dict(held() - before)}; threads: {threads}") from None


def children() -> set[int]:
    return {int(pid) for task in os.listdir("/proc/self/task") for pid in _children_of(task)}


def _children_of(task: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{task}/children").read_text().split()
    return []
