"""Whose sessions they are, how many there may be, how long they last, what they hold."""

from __future__ import annotations

import asyncio
import gc

import pytest
from app_under_test import App
from byte_tokenizer import make_byte_tokenizer
from timeouts import until

from tureen.admin.reporter import report_forever
from tureen.config import Config
from tureen.errors import InvalidRequest, NotFound, TooManyRequests, Unavailable
from tureen.sessions import sessions as sessions_module
from tureen.sessions.sessions import Sessions
from tureen.sessions.tree import SessionParams, SessionRequest

KEYS = {"anna": "a-key", "bert": "b-key"}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make_sessions(clock=None, **settings) -> Sessions:
    return Sessions(make_byte_tokenizer(), Config(**settings), abort=lambda _: None, clock=clock or Clock())


@pytest.fixture
def named(tmp_path):
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    file.chmod(0o600)
    with App(api_key_file=str(file), max_sessions=4) as app:
        app.session_clock = Clock()
        tokenizer, abort = app.state.context.tokenizer, app.client.abort
        app.state.sessions = Sessions(tokenizer, app.config, abort=abort, clock=app.session_clock)
        yield app


def post_as(app: App, name: str, path: str, **body):
    return app.request("POST", path, json=body, headers={"authorization": f"Bearer {KEYS[name]}"})


def ask(session: str, text: str, *, after: str | None = None, **fields) -> dict:
    params = {"temperature": 0, "max_new_tokens": 5}
    return {"text": text, "sampling_params": params, "session_params": {"id": session, "rid": after}} | fields


def test_a_session_is_for_the_client_that_opened_it(named: App):
    for name in KEYS:
        opened = post_as(named, name, "/open_session", capacity_of_str_len=100, session_id="same")
        assert (opened.status_code, opened.json()) == (200, "same")
    secret = post_as(named, "anna", "/open_session", capacity_of_str_len=100).json()
    for path, body in (("/close_session", {"session_id": "{}"}), ("/generate", ask("{}", "x"))):
        texts = []
        for name in (secret, "0" * 32):
            filled = {key: name if value == "{}" else value for key, value in body.items()}
            if "session_params" in body:
                filled["session_params"] = body["session_params"] | {"id": name}
            response = post_as(named, "bert", path, **filled)
            assert response.status_code == 404
            texts.append(response.text.replace(name, "ID"))
        assert texts[0] == texts[1]
    post_as(named, "anna", "/generate", **ask("same", "abc", rid="r"))
    assert post_as(named, "bert", "/generate", **ask("same", "x", after="r")).status_code == 400
    assert post_as(named, "anna", "/generate", **ask("same", "x", after="r")).status_code == 200
    assert post_as(named, "anna", "/generate", **ask(secret, "x")).status_code == 200


def test_a_client_gets_half_of_the_sessions_and_all_clients_no_more_than_there_are(named: App):
    def opened(name):
        return post_as(named, name, "/open_session", capacity_of_str_len=100, timeout=60)

    first = opened("anna").json()
    named.session_clock.now += 20
    assert opened("anna").status_code == 200
    refused = opened("anna")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "40")
    assert [opened("bert").status_code for _ in range(3)] == [200, 200, 429]
    assert post_as(named, "anna", "/close_session", session_id=first).status_code == 200
    assert opened("anna").status_code == 200
    named.session_clock.now += 60
    assert opened("anna").status_code == 200
    assert len(named.state.sessions) == 1


def test_clients_without_names_share_all_sessions():
    with App(max_sessions=3) as app:
        for _ in range(3):
            assert app.post("/open_session", capacity_of_str_len=5, timeout=100).status_code == 200
        refused = app.post("/open_session", capacity_of_str_len=5)
        assert refused.status_code == 503
        assert 90 <= int(refused.headers["retry-after"]) <= 100
        assert refused.json()["error"]["code"] == "too_many_sessions"


def test_a_session_ends_when_nobody_uses_it_and_not_while_a_request_runs():
    clock = Clock()
    sessions = make_sessions(clock, session_timeout_s=100)
    sessions.open(100, owner="", name="short", timeout_s=10)
    sessions.open(100, owner="", name="long")
    turn = sessions.extend(SessionParams(id="short"), [97], owner="")
    turn.begin("r", "1:r", [])
    clock.now += 99
    sessions.sweep()
    assert len(sessions) == 2
    turn.end([98])
    clock.now += 9
    sessions.extend(SessionParams(id="short", rid="r"), [99], owner="")
    assert len(sessions) == 2
    with pytest.raises(NotFound):
        sessions.close("long", owner="")
    clock.now += 10
    assert len(sessions) == 1
    with pytest.raises(NotFound, match="timed out"):
        sessions.extend(SessionParams(id="short", rid="r"), [99], owner="")
    assert (len(sessions), sessions.num_tokens) == (0, 0)


def test_the_server_closes_idle_sessions_by_itself():
    async def wait(app: App) -> None:
        assert app.state.sessions.open(100, owner="")
        reporter = asyncio.create_task(report_forever(app.state.common, app.config.log_interval_s))
        await until(lambda: len(app.state.sessions) == 0, "closing an idle session")
        reporter.cancel()

    with App(log_interval_s=5, session_timeout_s=60) as app:
        app.run(wait(app))


def test_a_turn_that_was_prepared_too_early_is_refused_when_it_begins():
    sessions = make_sessions()
    sessions.open(100, owner="", name="s")
    sessions.extend(SessionParams(id="s"), [97], owner="").begin("root", "1", [])
    late = [sessions.extend(SessionParams(id="s", rid="root", replace=True), [98], owner="") for _ in range(2)]
    sessions.extend(SessionParams(id="s", replace=True), [99], owner="").begin("root", "2", [])
    with pytest.raises(InvalidRequest, match="was replaced"):
        late[0].begin("x", "3", [])
    sessions.close("s", owner="")
    with pytest.raises(NotFound):
        late[1].begin("x", "3", [])
    sessions.open(100, owner="", name="s")
    with pytest.raises(NotFound):
        late[1].begin("x", "3", [])
    assert sessions.num_tokens == 0


def say(sessions: Sessions, name: str, rid: str, *, after: str | None = None, replace=False, new=(97, 98)) -> list[int]:
    turn = sessions.extend(SessionParams(id=name, rid=after, replace=replace), list(new), owner="")
    turn.begin(rid, rid, [])
    turn.end([99])
    return turn.token_ids


def test_a_long_conversation_keeps_each_token_once_and_has_an_end():
    sessions = make_sessions()
    sessions.open(10**6, owner="", name="s")
    prompt: list[int] = []
    for turn in range(1024):
        prompt += [97, 98]
        assert say(sessions, "s", f"{turn}", after=f"{turn - 1}" if turn else None) == prompt
        prompt.append(99)
    assert sessions.num_tokens == 1024 * 3
    with pytest.raises(InvalidRequest, match="1024 requests") as refusal:
        say(sessions, "s", "more", after="1023")
    assert refusal.value.code == "session_full"
    assert say(sessions, "s", "more", after="500", replace=True) == [*[97, 98, 99] * 501, 97, 98]
    assert sessions.num_tokens == 502 * 3


def test_tokens_of_all_sessions_are_bounded_and_a_client_has_half(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_TOKENS", 100)
    clock = Clock()
    sessions = make_sessions(clock)

    def put(owner, name, count, *, replace=False):
        turn = sessions.extend(SessionParams(id=name, replace=replace), [97] * count, owner=owner)
        turn.begin(f"{clock.now}", "x", [])
        turn.end([])
        clock.now += 1

    for owner in ("anna", "bert", ""):
        sessions.open(1000, owner=owner, name="s")
    put("anna", "s", 49)
    put("anna", "s", 1)
    with pytest.raises(TooManyRequests, match="50 tokens in sessions"):
        put("anna", "s", 1)
    put("bert", "s", 30)
    put("", "s", 20)
    with pytest.raises(Unavailable, match="100 tokens in sessions"):
        put("", "s", 1)
    put("", "s", 10, replace=True)
    assert sessions.num_tokens == 90
    sessions.close("s", owner="anna")
    assert sessions.num_tokens == 40


def count_nodes() -> int:
    gc.collect()
    return sum(type(one) is SessionRequest for one in gc.get_objects())


def test_thousands_of_sessions_leave_nothing_behind():
    before = count_nodes()
    clock = Clock()
    sessions = make_sessions(clock)
    for number in range(6000):
        name = sessions.open(1000, owner=f"owner {number % 7}", name=None if number % 2 else f"n{number}")
        owner = f"owner {number % 7}"
        turns = [sessions.extend(SessionParams(id=name), [97] * 5, owner=owner) for _ in range(2)]
        turns[0].begin("a", "1", [])
        turns[1].begin("b", "2", [])
        turns[0].end([98])
        if number % 3:
            sessions.close(name, owner=owner)
        turns[1].end(None if number % 5 else [98])
        clock.now += 20
    assert len(sessions) == 60
    clock.now += 3600
    sessions.sweep()
    assert (len(sessions), sessions.num_tokens, dict(sessions._num_tokens)) == (0, 0, {})
    del turns
    assert count_nodes() == before
