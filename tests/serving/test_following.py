"""Where a front looks for the engines that another one owns."""

from __future__ import annotations

import asyncio

import pytest
from simulated_processes import play
from timeouts import PATIENCE_S

from tureen.api_workers import following
from tureen.config import Config
from tureen.data_parallel.cluster_ca import ClusterAuthority, write_files
from tureen.errors import StartupError
from tureen.serving.client import ReplicaFacts

pytestmark = pytest.mark.usefixtures("processes")

SETTINGS = Config(api_workers=2, log_level="error")
NOBODY = ReplicaFacts(
    is_drained=False,
    is_parked=False,
    is_exchanging=False,
    weights=0,
    weight_version=None,
    failure=None,
    engine_id="",
)


def test_an_address_that_was_tried_is_not_tried_again_while_the_owner_may_tell_another(tmp_path, monkeypatch):
    """A front is as fast to come back to where an engine was as it takes to give up on it."""
    monkeypatch.setattr(following, "MOVE_S", PATIENCE_S)
    write_files(ClusterAuthority().issue("front"), tmp_path)
    (engine,) = following._engines_in_actors(SETTINGS, tmp_path, 1)

    async def scenario():
        engine.address = "tcp://127.0.0.1:7001"
        first = await engine.find()
        again = asyncio.create_task(engine.find())
        await asyncio.sleep(0)  # it has looked once
        waits = not again.done()
        engine.address = "tcp://127.0.0.1:7002"
        return first.port, waits, (await again).port

    assert play(scenario) == (7001, True, 7002)


def test_a_front_that_finds_no_engine_at_its_start_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(following, "WAIT_S", 0.01)

    async def scenario():
        with pytest.raises(StartupError, match="no engine answers within"):
            await following.join(SETTINGS, tmp_path, [NOBODY, NOBODY])

    play(scenario)
