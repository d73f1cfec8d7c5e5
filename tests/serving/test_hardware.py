"""An output that goes on in a replica that computes otherwise says so."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import pytest
from app_under_test import App
from fake_engine import make_engine
from resumable_requests import requests
from stepped_replicas import Worlds

OLD = "fake avx2 none"
NEW = "fake avx512vnni none"


def engine_on(processor):
    def make(*args, **options):
        engine, info = make_engine(*args, **options)
        return engine, msgspec.structs.replace(info, processor=processor)

    return make


class Told(Worlds):
    """Replicas on these processors, and what each request is told of them."""

    def __init__(self, *processors):
        super().__init__(len(processors))
        self.told = {}
        for place, processor in zip(self.places, processors, strict=True):
            place.factory = engine_on(processor)

    async def _follow(self, request):
        def watch(num_tokens, *, weight_version=None, hardware=()):
            if hardware:
                self.told[request.id] = hardware

        async for delta in self.client.generate(request, 1, watch):
            self.deltas[request.id].append(delta)


async def killed(number, *processors):
    """What was told, and which requests the replica had that was killed."""
    worlds = await Told(*processors).start()
    worlds.submit(*requests())
    await worlds.turns(4)
    moved = {name for name in worlds.at(number) if worlds.deltas[name]}
    worlds.places[number].host.lose("it was killed")
    await worlds.finish()
    await worlds.close()
    return worlds.told, moved


@pytest.mark.parametrize(("number", "expected"), [(0, (OLD, NEW)), (1, (NEW, OLD))])
def test_outputs_that_move_to_another_processor_are_told_both_and_no_others_are(number, expected):
    told, moved = asyncio.run(killed(number, "avx2", "avx512vnni"))
    assert moved
    assert told == dict.fromkeys(moved, expected)


def test_between_equal_processors_nothing_is_told():
    told, moved = asyncio.run(killed(0, "avx2", "avx2"))
    assert moved
    assert not told


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}}),
        ("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 3, "return_meta_info": True}),
    ],
)
@pytest.mark.parametrize("hardware", [(), (OLD, NEW)])
def test_an_answer_lists_what_has_computed_it_where_that_changed(monkeypatch, path, body, hardware):
    with App() as app:
        generate = app.client.generate

        def moved(request, interval=1, watch=None):
            return generate(request, interval, partial(watch, hardware=hardware))

        monkeypatch.setattr(app.client, "generate", moved)
        answer = app.post(path, **body).json()
    meta = (answer if path == "/generate" else answer["choices"][0])["meta_info"]
    assert meta.get("hardware", []) == list(hardware)
