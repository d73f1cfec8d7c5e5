"""A durable session of the real model goes on after `kill -9`, with the tokens of a conversation that nothing happened
to."""

from __future__ import annotations

import httpx
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.e2e

TURNS = ("The largest river of South America is the", " Its mouth lies in", " The fish in it are")


def ask(server: ServerProcess, text: str, rid: str, after: str | None) -> dict:
    body = {
        "text": text,
        "rid": rid,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12},
        "session_params": {"id": "rivers", "rid": after},
    }
    return httpx.post(f"{server.url}/generate", json=body, timeout=240).raise_for_status().json()


def open_session(server: ServerProcess, **fields) -> None:
    body = {"capacity_of_str_len": 4000, "session_id": "rivers", **fields}
    httpx.post(f"{server.url}/open_session", json=body).raise_for_status()


@pytest.fixture(scope="module")
def undisturbed(default_model_source) -> list[list[int]]:
    with ServerProcess() as server:
        open_session(server.wait_ready())
        rids = [None, "0", "1"]
        return [ask(server, text, str(number), rids[number])["output_ids"] for number, text in enumerate(TURNS)]


@pytest.mark.parametrize("more", [(), ("--api-workers", "2"), ("--replicas", "2")], ids=["one", "fronts", "replicas"])
def test_a_session_goes_on_after_each_kill(tmp_path, undisturbed, more):
    flags = ("--sessions-db", str(tmp_path / "sessions.db"), "--kv-disk", str(tmp_path / "kv"), *more)
    for number, text in enumerate(TURNS):
        with ServerProcess(*flags) as server:
            server.wait_ready()
            if number == 0:
                open_session(server, durable=True)
            answer = ask(server, text, str(number), str(number - 1) if number else None)
            server.process.kill()
            server.process.wait()
        assert answer["output_ids"] == undisturbed[number]
        assert "session_changes" not in answer["meta_info"]


def test_another_data_type_goes_on_and_is_told(tmp_path, default_model_source):
    flags = ("--sessions-db", str(tmp_path / "sessions.db"))
    with ServerProcess(*flags) as server:
        open_session(server.wait_ready(), durable=True)
        ask(server, TURNS[0], "0", None)
    with ServerProcess(*flags, "--kv-cache-dtype", "int8") as server:
        server.wait_ready()
        assert ask(server, TURNS[1], "1", "0")["meta_info"]["session_changes"] == ["dtype"]
