"""Clients that come back: streams that go on after a dropped connection, requests that are sent twice."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial

import httpx
import pytest
from app_under_test import LOCAL, App
from fake_engine import make_engine
from served_app import Exchange
from timeouts import until

from tureen.recordings import delta_log
from tureen.recordings import recording as recordings

GRACE_S = 30.0
BODY = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
LONG = {"text": "abc", "sampling_params": {"max_new_tokens": 1900}}
EVENT = re.compile(r"id: (([0-9a-f]{12})-(\d+))\n((?:event: \w+\n)?data: .*)\n\n")


@pytest.fixture(scope="module")
def app():
    with App(slow=True, resume_grace_s=GRACE_S) as running:
        yield running


def _stream(app: App, path: str = "/generate", **body) -> tuple[str, str]:
    """The id of the request and all of its stream."""
    answer = app.request("POST", path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.text


def _go_on(app: App, name: str, last: str | None = None, **headers: str) -> httpx.Response:
    more = {} if last is None else {"last-event-id": last}
    return app.request("GET", f"/generate/{name}/events", headers=more | headers)


def _ids(text: str) -> list[str]:
    events = EVENT.findall(text)
    assert "".join(f"id: {one[0]}\n{one[3]}\n\n" for one in events) == text
    return [one[0] for one in events]


# ---- streams


BODIES = [
    ("/generate", BODY),
    ("/generate", BODY | {"text": ["abc", "say:xyz", "abd"], "return_logprob": True}),
    ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 12}, "stream": True}),
    ("/v1/completions", {"prompt": "abc", "stream": True, "max_tokens": 12}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_goes_on_behind_any_of_its_events_with_exactly_the_bytes_that_are_left(app, path, body):
    request_id, text = _stream(app, path, **body)
    ids = _ids(text)
    assert ids == [f"{request_id}-{number}" for number in range(len(ids))]
    assert len(ids) > 10
    assert _go_on(app, request_id).text == text
    end = 0
    for one in ids:
        end = text.index("\n\n", end) + 2
        rest = _go_on(app, request_id, one)
        assert (rest.status_code, rest.text) == (200, text[end:])
    assert rest.headers["content-type"].startswith("text/event-stream")


def test_the_joined_stream_is_that_of_a_server_without_ids(app):
    body = BODY | {"sampling_params": {"max_new_tokens": 20, "sampling_seed": 7}, "rid": "same"}
    _, text = _stream(app, **body)
    with App(slow=True) as plain:
        _, expected = _stream(plain, **body)
    without = re.sub(r"^id: .*\n", "", text, flags=re.MULTILINE)
    timed = re.compile(r'"e2e_latency":[0-9.e-]+')
    assert timed.sub("", without.split("\n\n")[-3]) == timed.sub("", expected.split("\n\n")[-3])
    assert "id: " not in expected


def test_a_stream_is_found_by_the_client_s_own_name_for_it_and_by_the_answer_s_id(app):
    _, text = _stream(app, **BODY, rid="my/own name")
    assert _go_on(app, "my%2Fown%20name").text == text
    batch = BODY | {"text": ["abc", "abd"], "rid": "many"}
    _, text = _stream(app, **batch)
    assert _go_on(app, "many").text == _go_on(app, "many_1").text == text
    _, text = _stream(app, "/v1/completions", prompt="abc", stream=True, max_tokens=3)
    answer_id = json.loads(text.split("data: ")[1].split("\n")[0])["id"]
    assert _go_on(app, answer_id).text == text


def test_the_newest_of_two_streams_with_one_name_goes_on(app):
    _stream(app, **BODY, rid="again")
    _, text = _stream(app, **BODY, rid="again")
    assert _go_on(app, "again").text == text


@pytest.mark.parametrize(
    "last", ["", "nonsense", "5", "{id}", "{id}-", "{id}--1", "{id}-99999", "{other}-0", "x" * 5000]
)
def test_an_id_that_is_none_of_the_stream_is_refused(app, last):
    other, _ = _stream(app, **BODY)
    request_id, _ = _stream(app, **BODY)
    answer = _go_on(app, request_id, last.format(id=request_id, other=other))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_last_event_id")
    assert answer.json()["error"]["param"] == "Last-Event-ID"


@pytest.mark.parametrize("name", ["unknown", "a/b", "x" * 5000])
def test_a_stream_that_is_not_there_is_404(app, name):
    answer = _go_on(app, name)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


def test_what_is_no_event_stream_cannot_go_on(app):
    whole = app.post(text="say:a", rid="whole")
    assert _go_on(app, whole.headers["x-request-id"]).status_code == _go_on(app, "whole").status_code == 404
    mindie = app.post(prompt="say:a", stream=True)
    assert "\0" in mindie.text
    assert "id: " not in mindie.text
    assert _go_on(app, mindie.headers["x-request-id"]).status_code == 404


def test_without_a_time_of_grace_nothing_is_kept(app):
    with App() as plain:
        request_id, _ = _stream(plain, **BODY)
        answer = _go_on(plain, request_id)
        assert (answer.status_code, "--resume-grace" in answer.text) == (404, True)
        assert len(plain.state.recordings) == 0


def test_a_stream_belongs_to_the_client_that_asked_for_it(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann k-ann\nbob k-bob\n")
    keys.chmod(0o600)
    with App(api_key_file=str(keys), resume_grace_s=GRACE_S) as app:
        ann, bob = ({"authorization": f"Bearer k-{name}"} for name in ("ann", "bob"))
        text = app.request("POST", "/generate", json=BODY | {"rid": "mine"}, headers=ann).text
        assert _go_on(app, "mine", **ann).text == text
        assert _go_on(app, "mine", **bob).status_code == 404
        assert _go_on(app, "mine").status_code == 401


def test_a_stream_that_has_ended_is_kept_for_the_time_of_grace(app, monkeypatch):
    request_id, text = _stream(app, **BODY)
    now = app.state.recordings._clock()
    monkeypatch.setattr(app.state.recordings, "_clock", lambda: now + GRACE_S - 1)
    assert _go_on(app, request_id).text == text
    monkeypatch.setattr(app.state.recordings, "_clock", lambda: now + GRACE_S + 1)
    assert _go_on(app, request_id).status_code == 404
    assert len(app.state.recordings) == 0


def test_an_error_before_the_first_event_is_a_status_and_leaves_nothing(app):
    before = len(app.state.recordings)
    assert app.post(**BODY, temperature=1).status_code == 400
    assert len(app.state.recordings) == before


# ---- clients that leave


def _begun(app: App, path: str, body: dict | None = None, **headers: str) -> Exchange:
    """Send a request, on the application's loop, and do not wait for its answer."""
    method = "GET" if body is None else "POST"
    return Exchange(app.app, httpx.Request(method, f"{LOCAL}{path}", json=body, headers=headers))


async def _hear(exchange: Exchange, num_events: int) -> str:
    """Read an answer until it has so many events or ends, and leave."""
    text = ""
    while text.count("\n\n") < num_events and (piece := await exchange.piece()) is not None:
        text += piece.decode()
    await exchange.leave()
    return text


def _heard(app: App, num_events: int, path: str, body: dict | None = None, **headers: str) -> str:
    async def scenario() -> str:
        return await _hear(_begun(app, path, body, **headers), num_events)

    return app.run(scenario())


def test_a_stream_whose_connection_drops_goes_on_unheard_and_nothing_is_lost(app):
    body = BODY | {"rid": "dropped", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    last = _ids(_heard(app, 5, "/generate", body))[-1]
    rest, text = _go_on(app, "dropped", last).text, _go_on(app, "dropped").text
    assert text.endswith(rest)
    assert _ids(text)[_ids(text).index(last) + 1 :] == _ids(rest)
    final = json.loads(rest.split("data: ")[-2].strip().split("\n")[0])
    assert final["meta_info"]["completion_tokens"] == 50
    assert rest.endswith("data: [DONE]\n\n")


def test_a_stream_that_nobody_comes_back_to_is_aborted_after_the_time_of_grace():
    with App(slow=True, resume_grace_s=0.3) as short:
        for _ in range(2):
            _heard(short, 1, "/generate", LONG | {"stream": True, "rid": "left"})
            short.check_idle()
            assert _go_on(short, "left").status_code == 404


def test_the_time_of_grace_of_a_stream_that_ended_unheard_begins_with_its_end():
    with App(slow=True, resume_grace_s=GRACE_S) as app:
        kept = app.state.recordings
        _heard(app, 1, "/generate", BODY | {"rid": "unheard", "sampling_params": {"max_new_tokens": 600}})
        (recording,) = kept._running
        assert not recording._num_listeners
        app.wait_until(lambda: kept._ended, "the end of the recording")
        assert [*kept._ended] == [recording]
        assert recording._leaving.cancelled()
        assert not recording.is_abandoned.is_set()


def test_who_comes_back_in_time_may_leave_again(app):
    _heard(app, 1, "/generate", BODY | {"rid": "often"})
    last, seen = None, []
    while not seen or "[DONE]" not in seen[-1]:
        headers = {"last-event-id": last} if last else {}
        text = _heard(app, 6, "/generate/often/events", **headers)
        seen.append("".join(f"{event}\n\n" for event in text.split("\n\n")[:-1][:6]))  # what it has seen
        last = _ids(seen[-1])[-1]
    assert len(seen) > 3
    ids = _ids("".join(seen))
    assert [one.split("-")[1] for one in ids] == [str(number) for number in range(len(ids))]
    assert _go_on(app, "often").text == "".join(seen)


def test_an_answer_that_is_no_stream_ends_with_its_connection_all_the_same(app):
    async def scenario() -> None:
        asked = _begun(app, "/generate", LONG)
        await until(lambda: app.client.stats.num_running == 1, "the start")
        await asked.leave()

    app.run(scenario())
    app.check_idle()
    assert app.client.stats.total_output_tokens < LONG["sampling_params"]["max_new_tokens"]


def test_two_listeners_hear_the_same(app):
    async def scenario() -> list[str]:
        first = _begun(app, "/generate", BODY | {"rid": "shared"})
        await first.head()
        later = [asyncio.create_task(app.http.get("/generate/shared/events")) for _ in range(3)]
        return [await _hear(first, 1000), *[(await each).text for each in later]]

    texts = app.run(scenario())
    assert texts == texts[:1] * 4
    assert "[DONE]" in texts[0]


# ---- memory


def test_what_is_kept_is_bounded_however_many_come(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_TOTAL_BYTES", 10_000)
    with App(resume_grace_s=1e6, idempotency_retention_s=1e6) as app:
        body = {"text": "say:xyz", "stream": True}
        for index in range(60):
            key = {"idempotency-key": f"k{index}"} if index % 2 else {}
            newest = app.request("POST", "/generate", json=body, headers=key)
        kept = app.state.recordings
        assert kept._num_bytes <= 10_000
        assert kept._num_bytes == sum(one.track.num_bytes for one in kept._ended)
        assert 0 < len(kept) < 60
        assert len(kept._by_key) <= len(kept)
        assert not kept._running
        assert _go_on(app, newest.headers["x-request-id"]).text == newest.text
        monkeypatch.setattr(recordings, "MAX_ENDED", 3)
        app.request("POST", "/generate", json=body)
        assert len(kept) == 3


def test_streams_that_run_count_too_and_the_oldest_can_be_gone_on_with_from_near_its_end_only(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_TOTAL_BYTES", 20_000)
    monkeypatch.setattr(recordings, "CUT_BYTES", 2_000)
    monkeypatch.setattr(delta_log, "GROUP", 4)
    with App(slow=True, resume_grace_s=GRACE_S) as app:

        async def scenario():
            body = BODY | {"sampling_params": {"max_new_tokens": 150, "ignore_eos": True}}
            tasks = [asyncio.create_task(app.http.post("/generate", json=body | {"rid": f"r{at}"})) for at in range(3)]
            sizes = []

            def have_ended():
                sizes.append(app.state.recordings._num_bytes)
                return all(task.done() for task in tasks)

            await until(have_ended, "the end of all")
            return max(sizes), [await task for task in tasks]

        most, answers = app.run(scenario())
        assert most <= 22_000
        assert not app.state.recordings._uncut
        for answer in answers:
            ids = _ids(answer.text)
            assert [one.split("-")[1] for one in ids] == [str(number) for number in range(len(ids))]
            assert answer.text.endswith("data: [DONE]\n\n")
        assert _go_on(app, "r0").status_code in (400, 404)
        assert app.state.recordings._num_bytes == sum(one.track.num_bytes for one in app.state.recordings._ended)


def test_who_reads_too_slowly_is_told_so_in_the_last_event(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_BYTES", 4_000)
    monkeypatch.setattr(delta_log, "GROUP", 4)
    with App(slow=True, resume_grace_s=GRACE_S) as app:

        async def scenario():
            sent = []
            may_send = asyncio.Event()
            body = json.dumps(BODY | {"rid": "slow"}).encode()
            unread = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if unread:
                    return unread.pop()
                await asyncio.Event().wait()

            async def send(message):
                sent.append(message)
                if message.get("body"):
                    await may_send.wait()

            headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/generate",
                "raw_path": b"/generate",
                "headers": headers,
            }
            scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "root_path": "", "http_version": "1.1"}
            listening = asyncio.create_task(app.app(scope, receive, send))
            await until(lambda: app.state.recordings._ended)
            may_send.set()
            await listening
            return sent

        sent = app.run(scenario())
        *_, last, end = [message["body"] for message in sent if "body" in message]
        assert last.startswith(b"event: error\ndata: ")
        assert json.loads(last.split(b"data: ")[1])["error"]["code"] == "client_too_slow"
        assert (end, sent[-1]["more_body"]) == (b"", False)


def test_clients_without_a_name_are_told_apart_by_their_address(app):
    async def ask(address: str, method: str, path: str, **how):
        transport = httpx.ASGITransport(app.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.request(method, path, **how)

    text = app.run(ask("10.0.0.1", "POST", "/generate", json=BODY | {"rid": "guess"})).text
    assert app.run(ask("10.0.0.1", "GET", "/generate/guess/events")).text == text
    assert app.run(ask("10.0.0.2", "GET", "/generate/guess/events")).status_code == 404


def test_of_a_stream_that_is_too_long_the_last_part_goes_on(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_BYTES", 4_000)
    monkeypatch.setattr(delta_log, "GROUP", 4)
    with App(slow=True, resume_grace_s=GRACE_S) as app:
        request_id, text = _stream(app, **BODY)
        gone = _go_on(app, request_id)
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "event_gone")
        ids = _ids(text)
        rest = _go_on(app, request_id, ids[-8]).text
        assert text.endswith(rest)
        assert _ids(rest) == ids[-7:]


# ---- Idempotency-Key


def _twice(app: App, key: str = "k1", path: str = "/generate", **body) -> httpx.Response:
    return app.request("POST", path, json=body, headers={"idempotency-key": key})


def _num_prompts(app: App) -> int:
    return app.client.stats.total_prompt_tokens


@pytest.fixture
def plain():
    with App(slow=True) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BODIES,
        ("/generate", BODY | {"stream": False}),
        ("/generate", {"prompt": "abc", "stream": True}),
        ("/v1/completions", {"prompt": "abc"}),
        ("/encode", {"text": "abc"}),
    ],
)
def test_who_sends_the_same_again_gets_the_same_and_it_runs_once(plain, path, body):
    first = _twice(plain, path=path, **body)
    num_prompts = _num_prompts(plain)
    second = _twice(plain, path=path, **body)
    assert first.status_code == 200
    assert (second.status_code, second.content) == (200, first.content)
    assert second.headers["content-type"] == first.headers["content-type"]
    assert (first.headers.get("idempotent-replayed"), second.headers["idempotent-replayed"]) == (None, "true")
    assert _num_prompts(plain) == num_prompts > 0


@pytest.mark.parametrize("stream", [True, False])
def test_who_sends_the_same_while_it_runs_hears_all_of_it_and_it_runs_once(plain, stream):
    async def scenario():
        def send():
            return asyncio.create_task(
                plain.http.post("/generate", json=BODY | {"stream": stream}, headers={"idempotency-key": "k"})
            )

        tasks = [send()]
        await until(lambda: plain.client.stats.total_output_tokens >= 10)
        tasks += [send(), send()]
        return [await task for task in tasks]

    answers = plain.run(scenario())
    assert len({answer.text for answer in answers}) == 1
    assert plain.client.stats.total_prompt_tokens == 3
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3
    plain.check_idle()


def test_a_key_belongs_to_one_request(plain):
    assert _twice(plain, text="say:a").status_code == 200
    for other in (
        _twice(plain, text="say:b"),
        _twice(plain, text="say:a", stream=False),
        _twice(plain, path="/encode", text="say:a"),
        plain.request("PUT", "/generate", json={"text": "say:a"}, headers={"idempotency-key": "k1"}),
    ):
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert _twice(plain, "k2", text="say:b").json()["text"] == "b"
    assert plain.post(text="say:b").json()["text"] == "b"


def test_keys_of_two_clients_have_nothing_to_do_with_each_other(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann k-ann\nbob k-bob\n")
    keys.chmod(0o600)
    with App(api_key_file=str(keys)) as app:
        answers = [
            app.request(
                "POST",
                "/generate",
                json={"text": f"say:{name}"},
                headers={"idempotency-key": "1", "authorization": f"Bearer k-{name}"},
            )
            for name in ("ann", "bob")
        ]
        assert [answer.json()["text"] for answer in answers] == ["ann", "bob"]


@pytest.mark.parametrize(
    "key", ["", " ", "x" * 256, "a b", "a\tb", "caf\u00e9".encode(), b"\x7f", b"\xa0a", b"\x85a", b"a\x1f"]
)
def test_a_key_that_is_none_is_refused(plain, key):
    answer = plain.request("POST", "/generate", json={"text": "say:a"}, headers={"idempotency-key": key})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_idempotency_key")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/open_session", {"capacity_of_str_len": 100}),
        ("POST", "/close_session", {"session_id": "a"}),
        ("POST", "/abort_request", {"rid": "a"}),
        ("POST", "/flush_cache", None),
        ("POST", "/update_weight_version", {"new_version": "2"}),
        ("GET", "/v1/models", None),
    ],
)
def test_a_key_is_refused_where_it_does_nothing(plain, method, path, body):
    answer = plain.request(method, path, json=body, headers={"idempotency-key": "k"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert "Idempotency-Key" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_aborted_is_not_kept(plain, stream):
    async def scenario():
        body = BODY | {"stream": stream, "rid": "off", "sampling_params": {"max_new_tokens": 1900}}
        sent = asyncio.create_task(plain.http.post("/generate", json=body, headers={"idempotency-key": "k"}))
        await until(lambda: plain.client.stats.total_output_tokens >= 5)
        await plain.http.post("/abort_request", json={"rid": "off"})
        await sent

    plain.run(scenario())
    assert not plain.state.recordings._by_key
    assert len(plain.state.recordings) == 0


def test_two_keys_are_refused_and_the_longest_and_the_draft_s_own_are_taken(plain):
    headers = [("idempotency-key", "a"), ("idempotency-key", "b")]
    assert plain.request("POST", "/generate", json={"text": "say:a"}, headers=headers).status_code == 400
    for key in ("x" * 255, '"8e03978e-40d5-43dd-bc93-6894a57f9324"'):
        assert _twice(plain, key, text="say:a").status_code == 200
        assert _twice(plain, key, text="say:a").headers["idempotent-replayed"] == "true"


def test_what_failed_is_not_kept(plain, monkeypatch):
    assert _twice(plain, text="say:a", rid="").status_code == 400
    assert _twice(plain, text="say:a").status_code == 200
    failing = {"text": "say:ab", "sampling_params": {"max_new_tokens": 8}}

    generate = plain.client.generate

    async def fail(request, *how):
        async for delta in generate(request, *how):
            yield delta
            raise recordings.Conflict("the test's own")

    for stream in (True, False):
        key = f"fails-{stream}"
        monkeypatch.setattr(plain.client, "generate", fail)
        broken = _twice(plain, key, **failing, stream=stream)
        assert "the test's own" in broken.text
        monkeypatch.undo()
        answer = _twice(plain, key, **failing, stream=stream)
        assert "the test's own" not in answer.text
        assert "idempotent-replayed" not in answer.headers


def test_an_answer_is_kept_for_its_time(plain, monkeypatch):
    few = {"max_new_tokens": 3}
    first = _twice(plain, text="abc", sampling_params=few)
    now = plain.state.recordings._clock()
    monkeypatch.setattr(plain.state.recordings, "_clock", lambda: now + 59)
    assert _twice(plain, text="abc", sampling_params=few).text == first.text
    monkeypatch.setattr(plain.state.recordings, "_clock", lambda: now + 61)
    again = _twice(plain, text="abd", sampling_params=few)
    assert (again.status_code, "idempotent-replayed" in again.headers) == (200, False)


def test_an_answer_that_is_too_long_to_be_kept_is_made_again(plain, monkeypatch):
    monkeypatch.setattr(recordings, "MAX_BYTES", 100)
    assert _twice(plain, text="say:a").status_code == 200
    again = _twice(plain, text="say:a")
    assert (again.status_code, "idempotent-replayed" in again.headers) == (200, False)
    assert len(plain.state.recordings) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_the_request_goes_on_for_the_second_when_the_first_leaves_and_ends_when_both_have(plain, stream):
    body = {"text": "abc", "stream": stream, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}

    async def begin_twice(key: str) -> tuple[Exchange, Exchange, recordings.Recording]:
        await plain.http.post("/pause_generation", json={"mode": "in_place"})
        first = _begun(plain, "/generate", body, **{"idempotency-key": key})
        await until(lambda: plain.client.stats.num_queued == 1, "the start")
        second = _begun(plain, "/generate", body, **{"idempotency-key": key})
        recording = next(iter(plain.state.recordings._running))
        await until(lambda: recording._num_listeners == 2, "the second")
        return first, second, recording

    async def one_leaves() -> Exchange:
        first, second, recording = await begin_twice("k")
        await first.leave()
        assert recording._num_listeners == 1
        await plain.http.post("/continue_generation", json={})
        await second.head()
        assert '"completion_tokens":60' in await _hear(second, 1000)
        return second

    async def both_leave() -> None:
        for exchange in (await begin_twice("new"))[:2]:
            await exchange.leave()
        await until(lambda: not plain.client.stats.num_queued, "the abort")
        await plain.http.post("/continue_generation", json={})

    assert (b"idempotent-replayed", b"true") in plain.run(one_leaves()).headers
    assert plain.client.stats.total_prompt_tokens == 3
    plain.run(both_leave())
    plain.check_idle()
    assert plain.metrics()["num_aborted_requests_total"] == 1
    again = _twice(plain, "new", **body)
    assert (again.status_code, "idempotent-replayed" in again.headers) == (200, False)


def test_a_request_that_is_sent_twice_counts_once(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann k-ann max_requests=1 tokens_per_minute=1000\n")
    keys.chmod(0o600)
    with App(factory=partial(make_engine, step_s=0.2), api_key_file=str(keys)) as app:
        app.state.quotas._clock = lambda: 1000.0  # nothing comes back while the test is held up
        headers = {"authorization": "Bearer k-ann", "idempotency-key": "1"}

        async def scenario():
            tasks = [asyncio.create_task(app.http.post("/generate", json=BODY, headers=headers)) for _ in range(3)]
            await until(lambda: app.client.stats.total_output_tokens >= 5)
            refused = await app.http.post("/generate", json=BODY, headers=headers | {"idempotency-key": "2"})
            answers = [await task for task in tasks]
            again = await app.http.post("/generate", json=BODY, headers=headers | {"idempotency-key": "2"})
            return refused, answers, again

        refused, answers, again = app.run(scenario())
        assert refused.status_code == 429
        assert [answer.status_code for answer in answers] == [200] * 3
        assert again.status_code == 200
        assert "idempotent-replayed" not in again.headers
        left = app.request("POST", "/generate", json={"text": "say:"}, headers=headers | {"idempotency-key": "3"})
        spent = 2 * (3 + 40) + 4 + 1
        assert int(left.headers["x-ratelimit-remaining-tokens"]) == 1000 - spent
