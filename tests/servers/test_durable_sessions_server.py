"""A durable session of the real model goes on after `kill -9`, with the tokens of a conversation that nothing happened
to."""

from __future__ import annotations

import httpx
from server_process import ServerProcess

TURNS = ("The largest river of South America is the", " Its mouth lies in")


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


def test_a_session_goes_on_after_a_kill_with_several_fronts_and_replicas(server, tmp_path):
    """`server` is the one to which nothing happens. tests/api/test_durable_sessions.py has other settings."""
    open_session(server)
    rids = [None, "0"]
    expected = [ask(server, text, str(number), rids[number]) for number, text in enumerate(TURNS)]
    kept = ("--sessions-db", str(tmp_path / "sessions.db"), "--kv-disk", str(tmp_path / "kv"))
    for number, text in enumerate(TURNS):
        with ServerProcess(*kept, "--api-workers", "2", "--replicas", "2") as killed:
            killed.wait_ready()
            if number == 0:
                open_session(killed, durable=True)
            answer = ask(killed, text, str(number), rids[number])
            killed.process.kill()
            killed.process.wait()
        assert answer["output_ids"] == expected[number]["output_ids"]
        assert "session_changes" not in answer["meta_info"]
