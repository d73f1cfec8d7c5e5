"""Waiting in tests for what other threads, processes and event loops do, however slow the machine is.

Nothing here measures: a limit is a net, which catches what never comes, and is far from what a busy machine needs.
`test_slow_machine.py` finds tests that wait otherwise.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

import httpx
from virtual_clock import VirtualLoop

PATIENCE_S = 180.0
"""The net: the wait of a test for one thing. Less than the limit of a whole test in pyproject.toml."""

LOOK_S = 0.005
FIRST_LOOK_S = 0.0002
"""How soon a test looks again at first; each time it takes twice as long, up to LOOK_S."""


def wait_until(
    condition: Callable[[], object], what: object = "what was waited for", patience_s: float = PATIENCE_S
) -> None:
    limit, pause_s = time.monotonic() + patience_s, FIRST_LOOK_S
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"{what} did not happen within {patience_s} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S)


async def until(
    condition: Callable[[], object], what: object = "what was waited for", *, unless: asyncio.Future | None = None
) -> None:
    """The same in an event loop. `unless` is work that may not end before."""
    if isinstance(loop := asyncio.get_running_loop(), VirtualLoop):
        await loop.when(lambda: condition() or (unless is not None and unless.done()), what)
        assert condition(), f"the work ended before {what}: {unless!r}"
        return
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        if unless is not None and unless.done():
            raise AssertionError(f"the work ended before {what}: {unless!r}")
        if time.monotonic() > limit:
            raise AssertionError(f"{what} did not happen within {PATIENCE_S} s")
        await asyncio.sleep(LOOK_S)


def be_patient_over_http() -> None:
    """httpx gives up after five seconds where nothing else is said."""
    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = PATIENCE_S
