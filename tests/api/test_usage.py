"""What each client used is counted as its answers say, and kept across restarts; quotas go on from it."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import sqlite3
import threading
from typing import Any

import httpx
import pytest
from app_under_test import App
from timeouts import PATIENCE_S

from tureen.clients.quotas import Quotas, Tally
from tureen.clients.use_keeping import UseKeeper
from tureen.config import Config
from tureen.errors import StartupError
from tureen.storage.database import Database

COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens")
ADMIN = {"authorization": "Bearer ADMIN"}


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    path = tmp_path / "keys"
    path.write_text("ada KEY-ADA\nbob KEY-BOB tokens_per_minute=50\n")
    path.chmod(0o600)
    return {"api_key_file": str(path), "admin_api_key": "ADMIN", "usage_db": str(tmp_path / "usage.db")}


def ask(app: App, key: str, text: str, num_tokens: int) -> httpx.Response:
    body = {"text": text, "sampling_params": {"max_new_tokens": num_tokens}}
    return app.request("POST", "/generate", json=body, headers={"authorization": f"Bearer {key}"})


def usage(app: App) -> dict[str, dict[str, int]]:
    answer = app.request("GET", "/usage", headers=ADMIN)
    assert answer.status_code == 200
    return {each.pop("client"): each for each in answer.json()["clients"]}


def lines(app: App) -> list[list[str]]:
    answer = app.request("GET", "/usage?format=csv", headers=ADMIN)
    assert answer.headers["content-type"].startswith("text/csv")
    return list(csv.reader(answer.text.splitlines()))


def told(answers: list[httpx.Response]) -> dict[str, int]:
    """The sums of what the clients were told."""
    facts = [answer.json()["meta_info"] for answer in answers]
    names = {"prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "output_tokens": "completion_tokens"}
    sums = {ours: sum(fact[theirs] for fact in facts) for ours, theirs in names.items()}
    return {"requests": len(facts), "failed": 0, **sums}


def test_each_client_s_use_is_the_sum_of_what_it_was_told_and_lives_through_restarts(settings):
    answers: dict[str, list[httpx.Response]] = {"ada": [], "bob": []}
    for _ in range(2):
        with App(**settings) as app:
            answers["ada"] += [ask(app, "KEY-ADA", "a prompt of two pages, more or less", 5) for _ in range(3)]
            answers["bob"].append(ask(app, "KEY-BOB", "b", 3))
            expected = {client: told(each) for client, each in answers.items()}
            assert usage(app) == expected
            head, *rows = lines(app)
            assert head == ["day", "client", *COUNTS]
            assert {row[1]: [int(value) for value in row[2:]] for row in rows} == {
                client: list(each.values()) for client, each in expected.items()
            }
    with App(**settings) as app:
        assert usage(app) == expected


def test_who_was_in_debt_still_is_after_a_restart(settings):
    with App(**settings) as app:
        assert ask(app, "KEY-BOB", "b", 1500).status_code == 200
        assert ask(app, "KEY-BOB", "b", 1).status_code == 429
    with App(**settings) as app:
        refused = ask(app, "KEY-BOB", "b", 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tokens_per_minute")
        assert ask(app, "KEY-ADA", "a", 1).status_code == 200
    without = {name: value for name, value in settings.items() if name != "usage_db"}
    with App(**without) as app:
        assert ask(app, "KEY-BOB", "b", 1).status_code == 200


def test_time_pays_a_debt_back_while_no_server_runs(settings):
    with App(**settings) as app:
        ask(app, "KEY-BOB", "b", 1500)
    with contextlib.closing(sqlite3.connect(settings["usage_db"])) as connection, connection:
        connection.execute("UPDATE buckets SET at_s = at_s - 3600")  # an hour is 3,000 tokens
    with App(**settings) as app:
        assert ask(app, "KEY-BOB", "b", 1).status_code == 200


def test_two_writes_at_once_count_nothing_twice(settings):
    with App(**settings) as app:
        ask(app, "KEY-ADA", "a", 3)

        async def flush_often() -> None:
            await asyncio.gather(*(app.state.common.use.flush() for _ in range(5)))

        app.run(flush_often())
        assert app.state.common.use.num_unwritten == 0
        assert [row[2] for row in lines(app)[1:]] == ["1"]


def test_a_server_that_stops_while_it_writes_counts_nothing_twice(tmp_path, monkeypatch):
    path, may_write, writing = str(tmp_path / "usage.db"), threading.Event(), threading.Event()
    transact = Database._transact

    def slow(self, work):
        writing.set()
        assert may_write.wait(PATIENCE_S)
        return transact(self, work)

    async def stop_while_writing() -> None:
        keeper = UseKeeper(Quotas(Config()), path)
        keeper._quotas.tallies["ada"] = Tally(requests=1)
        monkeypatch.setattr(Database, "_transact", slow)
        keeper._task = asyncio.create_task(keeper.flush())
        await asyncio.to_thread(writing.wait, PATIENCE_S)
        closing = asyncio.create_task(keeper.close())
        await asyncio.wait([keeper._task], timeout=PATIENCE_S)
        may_write.set()
        await closing

    asyncio.run(stop_while_writing())
    quotas = Quotas(Config())
    asyncio.run(UseKeeper(quotas, path).close())
    assert quotas.tallies["ada"].requests == 1


def test_a_file_that_is_none_is_refused_by_the_setting_s_name(tmp_path):
    (tmp_path / "no.db").write_text("a text")
    with pytest.raises(StartupError, match=r"--usage-db .*not an SQLite file"):
        App(usage_db=str(tmp_path / "no.db"))


def test_without_a_file_use_is_counted_since_the_start_and_has_no_days():
    with App() as app:
        app.generate(text="a", sampling_params={"max_new_tokens": 2})
        answer = app.request("GET", "/usage").json()
        assert (answer["kept"], answer["unwritten_requests"]) == (False, None)
        assert [row[:3] for row in lines(app)[1:]] == [["", "", "1"]]
        assert "format" in app.request("GET", "/usage?format=xml").json()["error"]["message"]
