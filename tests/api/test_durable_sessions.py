"""Sessions that survive their server: what is on the disk when a client hears of an end, whose they are, what they are
bound to, how many there may be."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from app_under_test import App
from patient_disk import wait_for_disks
from real_app import RealApp, write_model

from tureen.errors import StartupError, Unavailable
from tureen.requests.session_keeping import SessionKeeper
from tureen.sessions.sessions import Sessions

GREEDY = {"temperature": 0, "max_new_tokens": 5}
KEYS = {"anna": "a-key", "bert": "b-key"}


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "sessions.db")


def start(path: str, **settings) -> App:
    return App(sessions_db=path, **settings)


def open_session(app: App, **fields) -> str:
    response = app.post("/open_session", **({"capacity_of_str_len": 1000, "durable": True} | fields))
    assert response.status_code == 200, response.text
    return response.json()


def ask(session: str, text: str, rid: str | None = None, after: str | None = None, **own) -> dict:
    params = {"id": session, "rid": after, **own}
    return {"text": text, "rid": rid, "sampling_params": GREEDY, "session_params": params}


def shown(app: App, session: str) -> dict:
    response = app.request("GET", f"/sessions/{session}")
    assert response.status_code == 200, response.text
    return response.json()


def copy_as_killed(path: str, folder: Path) -> str:
    """What a `kill -9` at this moment leaves, beside the server that goes on."""
    folder.mkdir()
    for file in Path(path).parent.glob("sessions.db*"):
        shutil.copy(file, folder)
    return str(folder / "sessions.db")


@pytest.mark.parametrize("variant", ["llama", "lfm2", "qwen3-5"])
def test_a_turn_after_a_restart_computes_only_what_is_new_of_its_session(path, tmp_path, variant, monkeypatch):
    """Their pages, and the states of recurrent layers, are read from --kv-disk."""
    wait_for_disks(monkeypatch)
    folder, whole, last = tmp_path / "model", [], None
    write_model(folder, 0, variant)
    with RealApp(folder) as alone:
        for turn, text in enumerate(("a long first question", "and", "then what", "end")):
            with RealApp(folder, sessions_db=path, kv_disk=str(tmp_path / "kv")) as app:
                if turn == 0:
                    open_session(app, session_id="s")
                answer = app.generate(**ask("s", text, f"turn {turn}", last))
            num_known, last = max(0, len(whole) - 1), f"turn {turn}"
            whole += text.encode()
            assert answer["output_ids"] == alone.generate(input_ids=whole, sampling_params=GREEDY)["output_ids"]
            assert answer["meta_info"]["cached_tokens"] == num_known // 4 * 4
            whole += answer["output_ids"]


@pytest.mark.parametrize("seed", range(2))
def test_a_tree_goes_on_after_a_kill_at_any_end_with_the_tokens_of_the_full_prompts(path, tmp_path, seed):
    rng, whole = random.Random(seed), {}
    for life in range(4):
        with start(path) as app:
            if life == 0:
                open_session(app, session_id="s")
            for number in range(6):
                after = rng.choice([None, *whole, *whole])
                kept = [] if after is None else whole[after]
                offset = rng.choice([None, rng.randint(1, len(kept))]) if kept else None
                new = "".join(rng.choice("abc") for _ in range(rng.randint(1, 8)))
                rid = f"{life}.{number}"
                body = ask("s", new, rid, after, offset=offset)
                answer = app.events(**body)[-1] if rng.random() < 0.5 else app.generate(**body)
                killed = copy_as_killed(path, tmp_path / rid)
                prompt = kept[:offset] + list(new.encode())
                alone = app.generate(input_ids=prompt, sampling_params=GREEDY)
                assert answer["output_ids"] == alone["output_ids"]
                assert "session_changes" not in answer["meta_info"]
                whole[rid] = prompt + answer["output_ids"]
        path = killed


def test_a_session_that_is_not_durable_is_forgotten_and_one_that_is_saved_is_not(path):
    with start(path) as app:
        for name in ("gone", "saved"):
            open_session(app, session_id=name, durable=False)
            app.generate(**ask(name, "ab", "r"))
        assert app.post("/save_session", session_id="saved").status_code == 200
        app.generate(**ask("saved", "cd", "s", "r"))
    with start(path) as app:
        assert app.post(**ask("gone", "x")).status_code == 404
        assert [each["rid"] for each in shown(app, "saved")["requests"]] == ["r", "s"]
        assert app.generate(**ask("saved", "ef", None, "s"))["meta_info"]["prompt_tokens"] == 2 + 5 + 2 + 5 + 2


def test_what_was_replaced_failed_or_closed_is_not_there_after_a_restart(path):
    with start(path) as app:
        for name in ("s", "closed", "deleted"):
            open_session(app, session_id=name)
        app.generate(**ask("s", "ab", "root"))
        app.generate(**ask("s", "cd", "old", "root"))
        app.generate(**ask("s", "ef", "new", "root", replace=True))
        assert app.post("/close_session", session_id="closed").status_code == 200
        deleted = app.request("DELETE", "/sessions/deleted")
        assert deleted.json() == {"session_id": "deleted", "deleted": True}
    with start(path) as app:
        assert [each["rid"] for each in shown(app, "s")["requests"]] == ["root", "new"]
        listed = app.request("GET", "/sessions").json()["sessions"]
        assert [each["session_id"] for each in listed] == ["s"]
        open_session(app, session_id="closed")


def test_a_fork_goes_on_apart_from_its_session(path):
    with start(path) as app:
        open_session(app, session_id="s")
        root = app.generate(**ask("s", "ab", "root"))["output_ids"]
        app.generate(**ask("s", "cd", "left", "root"))
        app.generate(**ask("s", "ef", "right", "root"))
        whole = app.post("/fork_session", session_id="s", new_session_id="all")
        assert (whole.status_code, whole.json()) == (200, "all")
        branch = app.post("/fork_session", session_id="s", rid="right", durable=False).json()
        missing = app.post("/fork_session", session_id="s", rid="nobody")
        assert missing.json()["error"]["code"] == "invalid_rid"
        assert [each["rid"] for each in shown(app, branch)["requests"]] == ["root", "right"]
        app.request("DELETE", "/sessions/s")
        answer = app.generate(**ask("all", "x", None, "root"))
        alone = app.generate(input_ids=[*b"ab", *root, *b"x"], sampling_params=GREEDY)
        assert answer["output_ids"] == alone["output_ids"]
    with start(path) as app:
        assert {each["rid"] for each in shown(app, "all")["requests"]} >= {"root", "left", "right"}
        assert app.request("GET", f"/sessions/{branch}").status_code == 404


def test_the_list_says_what_there_is(path):
    with start(path) as app:
        open_session(app, session_id="a/b c?", timeout=50)
        app.generate(**ask("a/b c?", "abc", "r"))
        [listed] = app.request("GET", "/sessions").json()["sessions"]
        assert 0 < listed.pop("expires_in") <= 50
        created = listed.pop("created")
        assert created > 1.7e9
        assert listed == {
            "session_id": "a/b c?",
            "durable": True,
            "capacity_of_str_len": 1000,
            "timeout": 50,
            "num_requests": 1,
            "num_tokens": 8,
            "model": app.client.info.model_name,
            "changes": [],
            "usable": True,
        }
        [request] = shown(app, "a%2Fb%20c%3F")["requests"]
        assert request == {
            "rid": "r",
            "continues": None,
            "prompt_tokens": 3,
            "kept_tokens": 0,
            "completion_tokens": 5,
            "running": False,
        }


def test_a_server_without_a_file_refuses_by_name():
    with App() as app:
        refused = app.post("/open_session", capacity_of_str_len=10, durable=True)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"] if "param" in error else error["field"]) == ("not_available", "durable")
        assert "--sessions-db" in error["message"]
        open_session(app, session_id="s", durable=False)
        assert app.post("/save_session", session_id="s").json()["error"]["code"] == "not_available"
        assert app.post("/fork_session", session_id="s", new_session_id="t").status_code == 200


def test_another_client_s_session_does_not_exist(path, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)

    def call(app: App, who: str, method: str, path: str, **body):
        headers = {"authorization": f"Bearer {KEYS.get(who, who)}"}
        return app.request(method, path, headers=headers, **({"json": body} if body else {}))

    with start(path, api_key_file=str(keys)) as app:
        call(app, "anna", "POST", "/open_session", capacity_of_str_len=100, session_id="mine", durable=True)
    with start(path, api_key_file=str(keys), api_key="shared", admin_api_key="boss") as app:
        for method, path_, body in (
            ("GET", "/sessions/mine", {}),
            ("DELETE", "/sessions/mine", {}),
            ("POST", "/fork_session", {"session_id": "mine"}),
            ("POST", "/save_session", {"session_id": "mine"}),
            ("POST", "/close_session", {"session_id": "mine"}),
            ("POST", "/generate", ask("mine", "x")),
        ):
            theirs, nobodys = (
                call(
                    app,
                    "bert",
                    method,
                    path_.replace("mine", name),
                    **msgspec.json.decode(msgspec.json.encode(body).replace(b"mine", name.encode())),
                )
                for name in ("mine", "none")
            )
            assert theirs.status_code == nobodys.status_code == 404, path_
            assert theirs.text.replace("mine", "none") == nobodys.text
        assert call(app, "bert", "GET", "/sessions").json() == {"sessions": []}
        assert len(call(app, "anna", "GET", "/sessions").json()["sessions"]) == 1
        refused = call(app, "shared", "GET", "/sessions")
        assert refused.status_code in (401, 403), "a client without a name may not read everybody's ids"


def test_a_client_s_durable_sessions_hold_so_many_tokens(path):
    with start(path, sessions_max_tokens=20) as app:
        for name in ("a", "b"):
            open_session(app, session_id=name)
        open_session(app, session_id="plain", durable=False)
        app.generate(**ask("a", "x" * 9, "r"))  # and five of the output
        refused = app.post(**ask("b", "x" * 7))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "session_quota_exceeded")
        assert int(refused.headers["retry-after"]) > 86400
        app.generate(**ask("plain", "x" * 30, "p"))
        assert app.post("/save_session", session_id="plain").status_code == 429
        assert app.post("/fork_session", session_id="a").status_code == 429
        app.generate(**ask("b", "x" * 6))
        app.request("DELETE", "/sessions/a")
        app.generate(**ask("b", "x" * 4))


class Clock:
    """Seconds since the epoch, and of the clock that each start of a machine sets anew."""

    def __init__(self):
        self.now = 1.8e9
        self.booted = self.now - 100

    def wall(self):
        return self.now

    def monotonic(self):
        return self.now - self.booted


def with_clock(path: str, clock: Clock, **settings) -> App:
    app = App(**settings)
    state = app.state
    config = msgspec.structs.replace(app.config, sessions_db=path)
    state.context = msgspec.structs.replace(state.context, config=config)
    state.sessions = Sessions(state.context.tokenizer, config, abort=app.client.abort, clock=clock.monotonic)
    with app.time():
        state.lifecycle.services.append(SessionKeeper(state, wall=clock.wall))
    return app


def test_time_goes_on_while_the_server_is_away(path):
    clock = Clock()
    with with_clock(path, clock, sessions_ttl_s=1000) as app:
        for name, timeout in (("short", 100), ("long", None)):
            open_session(app, session_id=name, timeout=timeout)
        too_long = app.post("/open_session", capacity_of_str_len=10, durable=True, timeout=1001)
        assert "--sessions-ttl" in too_long.json()["error"]["message"]
        clock.now += 90
        app.generate(**ask("short", "a", "r"))
        clock.now += 90
    clock.now, clock.booted = clock.now + 9, clock.now
    with with_clock(path, clock, sessions_ttl_s=1000) as app:
        assert shown(app, "short")["expires_in"] == 1
        assert shown(app, "long")["expires_in"] == 1000 - 189
        clock.now += 1
        assert app.request("GET", "/sessions/short").status_code == 404
    clock.now += 809
    with with_clock(path, clock, sessions_ttl_s=1000) as app:
        assert [each["session_id"] for each in app.request("GET", "/sessions").json()["sessions"]] == ["long"]
    clock.now += 1
    with with_clock(path, clock, sessions_ttl_s=1000) as app:
        assert app.request("GET", "/sessions").json() == {"sessions": []}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (0,)


def test_token_ids_of_another_tokenizer_are_refused_by_name(path):
    with start(path) as app:
        open_session(app, session_id="s")
        app.generate(**ask("s", "ab", "r"))
        first = app.client.info.model_name
    with start(path, special=("<another>",)) as app:
        refused = app.post(**ask("s", "cd", None, "r"))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (409, "session_of_another_tokenizer")
        assert first in error["message"]
        assert app.post("/fork_session", session_id="s").status_code == 409
        report = shown(app, "s")
        assert (report["usable"], report["changes"]) == (False, ["tokenizer"])
    with start(path) as app:
        app.generate(**ask("s", "cd", None, "r"))


def test_other_weights_and_other_hardware_go_on_and_are_told(path):
    with start(path, facts={"weights": "one", "processor": "avx2"}) as app:
        open_session(app, session_id="s")
        app.generate(**ask("s", "ab", "old"))
    with start(path, facts={"weights": "two", "processor": "avx512"}) as app:
        assert shown(app, "s")["changes"] == ["weights", "hardware"]
        for stream in (False, True):
            body = ask("s", "cd", f"new {stream}", "old")
            answer = app.events(**body)[-1] if stream else app.generate(**body)
            assert answer["meta_info"]["session_changes"] == ["weights", "hardware"]
        fresh = app.generate(**ask("s", "ef", "fresh"))
        assert "session_changes" not in fresh["meta_info"]
    with start(path, facts={"weights": "two", "processor": "avx512"}) as app:
        assert "session_changes" not in app.generate(**ask("s", "x", None, "fresh"))["meta_info"]
        below = app.generate(**ask("s", "x", None, "new True"))
        assert below["meta_info"]["session_changes"] == ["weights", "hardware"]


def test_weights_that_were_exchanged_are_others(path):
    with start(path) as app:
        open_session(app, session_id="s")
        app.generate(**ask("s", "ab", "r"))
        app.state.serve_weights(path="/elsewhere", version="2")
        answer = app.generate(**ask("s", "cd", "later", "r"))
        assert answer["meta_info"]["session_changes"] == ["weights"]
    with start(path) as app:
        assert shown(app, "s")["changes"] == ["weights"]


@pytest.mark.parametrize("table", ["new_ids", "base", "parent"])
def test_a_damaged_file_ends_the_start_with_a_word(path, table):
    with start(path) as app:
        open_session(app, session_id="s")
        app.generate(**ask("s", "ab", "r"))
        app.generate(**ask("s", "cd", "q", "r"))
    values = {"new_ids": b"no zlib", "base": 10**6, "parent": 77}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE requests SET {table} = ? WHERE rid = 'q'", (values[table],))
    with pytest.raises(StartupError, match=r"--sessions-db .*damaged"):
        start(path)


def test_a_file_of_something_else_ends_the_start_with_a_word(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (note TEXT)")
    Path(path).chmod(0o600)
    with pytest.raises(StartupError, match=r"--sessions-db .*another program"):
        start(path)
    Path(path).write_bytes(b"no database at all")
    with pytest.raises(StartupError, match=r"--sessions-db .*not an SQLite file"):
        start(path)


def use_sessions_that_are_not_durable(app: App) -> None:
    """Every call about them succeeds while the disk of durable sessions is full; only saving one is refused."""
    open_session(app, session_id="temporary", durable=False, timeout=60)
    app.generate(**ask("temporary", "ab", "r"))
    assert app.events(**ask("temporary", "cd", "t", "r"))[-1]["meta_info"]["finish_reason"] is not None
    assert app.post("/save_session", session_id="temporary").json()["error"]["code"] == "storage_full"
    app.generate(**ask("temporary", "ef", "u", "t"))
    assert (shown(app, "temporary")["durable"], shown(app, "temporary")["timeout"]) == (False, 60)
    assert app.post("/fork_session", session_id="temporary", new_session_id="copy").status_code == 200
    assert app.request("DELETE", "/sessions/copy").status_code == 200
    assert app.post("/close_session", session_id="temporary").status_code == 200


def test_what_cannot_be_written_is_told_and_written_later(path):
    with start(path) as app:
        open_session(app, session_id="s")
        keeper = app.state.sessions.keeper
        connection = keeper._file._database._connection
        with app.time():
            size = keeper._file._database.run_now(lambda each: each.execute("PRAGMA page_count").fetchone()[0])

        def limit(pages: int) -> None:
            with app.time():
                keeper._file._database._thread.submit(connection.execute, f"PRAGMA max_page_count = {pages}").result()

        limit(size)
        texts = "".join(random.Random(1).choices("abcdefgh", k=999))
        open_session(app, session_id="gone", capacity_of_str_len=10**6)
        statuses = []
        for number in range(40):
            statuses.append(app.post(**ask("gone", texts, f"{number}")).status_code)
            if statuses[-1] == 503:
                break
        assert set(statuses) == {200, 503}
        one = {"sampling_params": GREEDY | {"max_new_tokens": 1}}  # its first event is its end
        told = app.post(**ask("s", texts[:500], "told") | one, stream=True)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "storage_full")
        assert app.post("/open_session", capacity_of_str_len=10, durable=True, session_id="no").status_code == 503
        assert app.request("GET", "/sessions/no").status_code == 404
        use_sessions_that_are_not_durable(app)
        app.post("/close_session", session_id="gone")
        limit(10**6)
        app.generate(**ask("s", "ab", "later"))
    with start(path) as app:
        assert [each["rid"] for each in shown(app, "s")["requests"]] == ["told", "later"]
        assert app.request("GET", "/sessions/gone").status_code == 404


@pytest.mark.parametrize("faults", [1, 2])
def test_of_two_saves_of_a_session_on_a_full_disk_each_answers_what_became_of_it(path, monkeypatch, faults):
    with start(path) as app:
        open_session(app, session_id="s", durable=False)
        file, left = app.state.sessions.keeper._file, [Unavailable("the disk is full", code="storage_full")] * faults
        write = file.write

        async def write_later(*rows) -> None:
            await asyncio.sleep(0)
            if left:
                raise left.pop()
            await write(*rows)

        monkeypatch.setattr(file, "write", write_later)

        async def save_twice():
            return await asyncio.gather(*(app.http.post("/save_session", json={"session_id": "s"}) for _ in "ab"))

        codes = [answer.status_code for answer in app.run(save_twice())]
        assert sorted(codes) == [503, 503] if faults == 2 else [200, 503]
        assert shown(app, "s")["durable"] is (200 in codes)
