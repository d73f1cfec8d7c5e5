"""Answers in the making whose maker ends early, or whose listeners do not keep up."""

from __future__ import annotations

import asyncio
import json

import pytest
from app_under_test import App

from tureen.clients.quotas import Account, ClientWork
from tureen.config import Config
from tureen.errors import Conflict, RequestTimeout
from tureen.recordings import delta_log
from tureen.recordings import recording as recordings
from tureen.recordings.recording import Recordings

OWNER = ("name", "ann")
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
POST = {
    "type": "http",
    "method": "POST",
    "path": "/generate",
    "raw_path": b"/generate",
    "query_string": b"",
    "client": ("127.0.0.1", 1),
    "root_path": "",
    "http_version": "1.1",
}
OLLAMA = {"path": "/api/generate", "raw_path": b"/api/generate"}


def _record(kept: Recordings, make, key: tuple[str, bytes] | None = None) -> recordings.Recording:
    """A recording of what `make(send)` sends."""
    recording = kept.new("r", OWNER, ClientWork(Account()), key)
    recording.start(make(recording.send), kept.ended)
    return recording


async def _begin_and_stop(send) -> None:
    await send(START)
    await send({"type": "http.response.body", "body": b"some", "more_body": True})
    await asyncio.Event().wait()


async def _never_begin(send) -> None:
    await asyncio.Event().wait()


async def _break(send) -> None:
    raise ZeroDivisionError("the test's own")


async def _read(recording: recordings.Recording) -> bytes:
    return b"".join([part async for part in recording.follow(0)])


def test_whoever_listens_when_the_server_ends_is_told():
    async def scenario():
        kept = Recordings(Config())
        begun, unbegun = _record(kept, _begin_and_stop), _record(kept, _never_begin, ("k", b"1"))
        reading, waiting = asyncio.create_task(_read(begun)), asyncio.create_task(unbegun.started())
        while not begun.track.end:
            await asyncio.sleep(0)
        assert len(kept) == 2
        await kept.close()
        with pytest.raises(Conflict, match="aborted before its answer began") as caught:
            await waiting
        assert caught.value.code == "request_ended"
        assert await reading == b"some"
        assert [begun.is_success, unbegun.is_success] == [False, False]
        assert (len(kept), kept._num_bytes, kept._by_key) == (0, 0, {})

    asyncio.run(scenario())


def test_an_app_that_raises_raises_where_its_answer_is_awaited_and_nothing_is_kept():
    async def scenario():
        kept = Recordings(Config())
        recording = _record(kept, _break, ("k", b"1"))
        with pytest.raises(ZeroDivisionError):
            await recording.started()
        with pytest.raises(ZeroDivisionError):
            await _read(recording)
        assert (len(kept), kept._by_key) == (0, {})

    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "is_kept"), [(200, True), (204, True), (299, True), (300, False), (400, False)])
def test_of_an_answer_is_kept_for_its_key_what_says_success(status, is_kept):
    async def scenario():
        kept = Recordings(Config())

        async def make(send):
            await send(START | {"status": status})
            await send({"type": "http.response.body", "body": b"all"})

        recording = _record(kept, make, ("k", b"1"))
        assert await _read(recording) == b"all"
        assert kept.repeated(OWNER, "k", b"1") is (recording if is_kept else None)
        assert (len(kept), kept._num_bytes > 0) == (is_kept, is_kept)

    asyncio.run(scenario())


def test_before_it_runs_a_recording_has_not_ended_and_to_cancel_it_is_nothing():
    async def scenario():
        recording = Recordings(Config()).new("r", OWNER, ClientWork(Account()), None)
        await recording.cancel()
        assert (recording.is_ended, recording.is_success, recording.is_stream) == (False, False, False)

    asyncio.run(scenario())


def test_a_second_request_with_the_key_of_one_whose_beginning_is_gone_is_told_to_wait(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_BYTES", 400)
    monkeypatch.setattr(delta_log, "GROUP", 1)

    async def scenario():
        kept, may_end = Recordings(Config()), asyncio.Event()

        async def make(send):
            await send(START)
            for _ in range(9):
                await send({"type": "http.response.body", "body": b"x" * 100, "more_body": True})
            await may_end.wait()

        recording = _record(kept, make, ("k", b"1"))
        await recording.started()
        assert kept.repeated(OWNER, "k", b"1") is recording
        while recording.track.end < 9:
            await asyncio.sleep(0)
        with pytest.raises(Conflict) as caught:
            kept.repeated(OWNER, "k", b"1")
        assert caught.value.code == "answer_too_long"
        with pytest.raises(RequestTimeout, match="too slowly"):
            await _read(recording)
        may_end.set()
        await recording._making
        await asyncio.sleep(0)
        assert kept.repeated(OWNER, "k", b"1") is None

    asyncio.run(scenario())


def test_a_slow_reader_of_what_is_no_event_stream_is_cut_off(monkeypatch):
    """As Ollama's lines of JSON: an end that is no proper one says that there was more."""
    monkeypatch.setattr(recordings, "MAX_BYTES", 2_000)
    monkeypatch.setattr(delta_log, "GROUP", 4)
    body = json.dumps({"model": "fake-model", "prompt": "abc", "raw": True, "options": {"num_predict": 64}}).encode()
    sent = []
    with App(slow=True, resume_grace_s=30.0) as app:

        async def scenario():
            may_send, unread = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if unread:
                    return unread.pop()
                await asyncio.Event().wait()

            async def send(message):
                sent.append(message)
                if message.get("body"):
                    await may_send.wait()

            listening = asyncio.create_task(app.app({**POST, **OLLAMA, "headers": HEADERS}, receive, send))
            while not app.state.recordings._running:
                await asyncio.sleep(0)
            (recording,) = app.state.recordings._running
            await recording._making
            may_send.set()
            await listening

        app.run(scenario())
    texts = b"".join(message.get("body", b"") for message in sent).splitlines()
    assert 0 < len(texts) < 64
    assert not json.loads(texts[-1])["done"]
    assert sent[-1]["more_body"]


@pytest.mark.parametrize("key", [[], [(b"idempotency-key", b"k")]])
def test_a_client_that_leaves_within_its_body_leaves_nothing(key):
    messages = [{"type": "http.request", "body": b'{"text": "say', "more_body": True}, {"type": "http.disconnect"}]
    sent = []
    with App(resume_grace_s=30.0) as app:

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        app.run(app.app({**POST, "headers": HEADERS + key}, receive, send))
        assert (sent, len(app.state.recordings), app.client.stats.total_prompt_tokens) == ([], 0, 0)


def test_the_application_is_started_and_ended_through_what_stands_around_it():
    async def scenario(app):
        messages, sent = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], []

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message["type"])

        await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
        return sent

    with App() as app:
        assert app.run(scenario(app.app)) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
