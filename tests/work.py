"""Counting work, where a time would depend on the machine: the calls and lines of Python that ran."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

from virtual_clock import Elsewhere

from tureen.requests.offload import NUM_THREADS, offload

NOT_COUNTED = ("/httpx/", "/asyncio/", "/anyio/", "/sniffio/", "/logging/")
"""The client's own work, and what an event loop does more or less of as it likes."""


class Work:
    """`on_loop`: what the event loop's thread did; `elsewhere`: what other threads did, or would do in a server."""

    def __init__(self) -> None:
        self.on_loop = 0
        self.elsewhere = 0
        self._own = threading.get_ident()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Work | None:
        if any(part in frame.f_code.co_filename for part in NOT_COUNTED):
            return None
        if threading.get_ident() == self._own and not Elsewhere.depth:
            self.on_loop += 1
        else:
            self.elsewhere += 1
        return self


@contextmanager
def counted() -> Iterator[Work]:
    """Without the collector of garbage, whose callbacks and finalisers may be those of any test before."""
    work, before, threads = Work(), (sys.gettrace(), threading.gettrace()), offload._threads
    offload._threads = ThreadPoolExecutor(NUM_THREADS)  # whose threads start now
    gc.collect()
    gc.disable()
    threading.settrace(work)
    sys.settrace(work)
    try:
        yield work
    finally:
        sys.settrace(before[0])
        gc.enable()
        threading.settrace(before[1])  # type: ignore[arg-type]
        offload._threads.shutdown()
        offload._threads = threads


def count_lines(action: Callable[[], Any]) -> int:
    """What it calls included; what runs in C counts as nothing."""
    count, before = 0, sys.gettrace()
    gc.disable()  # plug-ins of pytest run code at each collection

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
