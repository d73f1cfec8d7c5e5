"""Does work that the first chat would wait for, as soon as no request runs."""

from __future__ import annotations

import asyncio
import contextlib

from tureen.errors import TureenError
from tureen.requests.state import ServerState

IDLE_S = 0.5
"""Seconds between two checks whether a request runs."""


async def probe_when_idle(state: ServerState) -> None:
    """Find out the abilities of a model's chat templates."""
    if state.context.info.pooling is not None:
        return
    while True:
        await asyncio.sleep(IDLE_S)
        if state.client.health.state == "unloaded":
            return
        if not state.num_running:
            break
    with contextlib.suppress(TureenError):  # the first chat tries again
        await asyncio.to_thread(state.context.probe_templates)
