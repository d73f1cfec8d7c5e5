"""The answer to an exchange of weights names the replicas that could not have them like the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from byte_tokenizer import make_byte_tokenizer
from stepped_replicas import Worlds

from tureen.admin import weight_routes
from tureen.app.application import build_app
from tureen.config import Config
from tureen.data_parallel import rolling
from tureen.errors import InvalidRequest
from tureen.serving import healing
from tureen.weights.source import ModelSource


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)
    monkeypatch.setattr(rolling, "TICK_S", 0)


def refuse(engine, fault: str) -> None:
    """Have an engine refuse weights, as long as it lives."""
    call = engine.call

    def refusing(op, **args):
        if op == "update_weights":
            raise InvalidRequest(fault)
        return call(op, **args)

    engine.call = refusing


def answers(monkeypatch, refusing: dict[int, str], **fields) -> list[dict]:
    """Exchange the weights twice; the engines that are there at first refuse, where they are to."""
    source = ModelSource("step-200", Path("step-200"), "gguf")
    monkeypatch.setattr(weight_routes, "_find", lambda *_: source)
    monkeypatch.setattr(weight_routes, "_check_tokenizer", lambda *_: None)
    monkeypatch.setattr(weight_routes.NewSource, "place", lambda _: {"number": 7, "path": "step-200"})

    async def scenario():
        worlds = await Worlds().start()
        for number, fault in refusing.items():
            refuse(worlds.places[number].host.engine, fault)
        app = build_app(worlds.client, make_byte_tokenizer(), Config())
        told = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            for _ in range(2):
                body = {"model_path": "step-200"} | fields
                asking = asyncio.create_task(http.post("/update_weights_from_disk", json=body))
                while not asking.done():
                    await worlds.turns(1)
                told.append(asking.result().json())
                await worlds.turns(3)
        await worlds.close()
        return told

    return asyncio.run(scenario())


@pytest.mark.parametrize("fields", [{}, {"rolling": True}])
def test_a_replica_that_gets_the_weights_by_a_restart_is_named_with_the_reason(monkeypatch, fields):
    first, second = answers(monkeypatch, {1: "no memory is left"}, **fields)
    assert first["success"] is True
    assert first["restarted_replicas"] == [1]
    assert "replica 1: no memory is left" in first["message"]
    assert "restarted_replicas" not in second


@pytest.mark.parametrize("fields", [{}, {"rolling": True}])
def test_where_all_can_have_the_weights_no_replica_is_named(monkeypatch, fields):
    first, _ = answers(monkeypatch, {}, **fields)
    assert first["success"] is True
    assert set(first) == {"success", "message", "num_paused_requests"}
