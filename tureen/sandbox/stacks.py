"""Sizes of stacks: a worker that compiles fails before a thread that loads what it compiled.

Compiling a grammar recurses as deep as it is nested; loading and following it, at most 4,000 calls, 512 KiB. A thread
whose stack is too small ends its whole process, and the default follows `ulimit -s`: 8 MiB mostly, but 2 MiB where that
is unlimited.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

WORKER_BYTES = 8 << 20
"""Most bytes of stack of a worker."""

THREAD_BYTES = 128 << 20
"""Bytes of address space for the stack of a thread that loads or follows grammars: more than a worker may use."""

_lock = threading.Lock()


@contextlib.contextmanager
def deep_stacks() -> Iterator[None]:
    """Give threads that are started inside a stack of THREAD_BYTES."""
    with _lock:
        before = threading.stack_size(THREAD_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


class DeepExecutor(ThreadPoolExecutor):
    """An executor whose threads have stacks of THREAD_BYTES."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do what ThreadPoolExecutor does, which starts threads here."""
        with deep_stacks():
            return super().submit(fn, *args, **kwargs)


def lower_own_stack() -> None:
    """Lower this process's limit to WORKER_BYTES, for good."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    lowered = WORKER_BYTES if soft == resource.RLIM_INFINITY else min(soft, WORKER_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (lowered, lowered))
