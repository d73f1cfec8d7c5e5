"""Runs a test's coroutine on a virtual clock, with a fleet of models."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))

from simulated_fleet import SimulatedFleet
from virtual_time import Clock, VirtualLoop, virtual_time

fields_of = functools.cache(msgspec.structs.fields)


@pytest.fixture
def simulate(monkeypatch):
    """Gives a function that runs `body(fleet)` over models of these sizes, in the order of work that a seed says."""

    # Virtual time does not wait for a process that renders chat templates.
    monkeypatch.setattr("tureen.requests.template_pool._can_have_pool", lambda: False)
    # Each application reads the fields of the bodies of its routes.
    monkeypatch.setattr(msgspec.structs, "fields", fields_of)

    def run(body, sizes, limit, *, seed=1, **how):
        clock, chance = Clock(), random.Random(seed)
        with virtual_time(clock, random.Random(f"ids {seed}")):
            loop = VirtualLoop(clock, chance)

            async def whole():
                fleet = await SimulatedFleet(loop, chance, sizes, limit, **how).start()
                try:
                    return await body(fleet)
                finally:
                    await fleet.close()

            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                return runner.run(whole())

    return run
