"""A server that is killed loses no response that a client saw end, and says of the others what became of them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import httpx
from patience import wait_until
from server_process import ServerProcess

PATH = "/v1/responses"


def ask(server: ServerProcess, said: str, **body) -> dict:
    asked = {"input": said, "max_output_tokens": 8, "temperature": 0} | body
    answer = httpx.post(f"{server.url}{PATH}", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: ServerProcess, said: str) -> dict:
    """Returns the response of the last event, as soon as that has come."""
    asked = {"input": said, "max_output_tokens": 8, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}{PATH}", json=asked) as answer:
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") in ("response.completed", "response.incomplete"):
                server.process.kill()
                return event["response"]
    raise AssertionError("the stream had no end")


def test_a_server_that_is_killed_loses_no_response_that_has_ended(default_model_source, tmp_path):
    path = tmp_path / "responses.db"
    with ServerProcess("--responses-store", str(path)) as server:
        server.wait_ready()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        first = ask(server, "What is the capital of France?")
        second = ask(server, "And of Italy?", previous_response_id=first["id"])
        running = ask(server, "Tell me a long story.", background=True, max_output_tokens=4000, ignore_eos=True)
        wait_until(
            lambda: httpx.get(f"{server.url}{PATH}/{running['id']}").json()["status"] == "in_progress",
            "the beginning of the response in the background",
        )
        last = stream(server, "What is the capital of Spain?")
        server.process.wait()
    with ServerProcess("--responses-store", str(path)) as server:
        server.wait_ready()
        for kept in (first, second, last):
            assert httpx.get(f"{server.url}{PATH}/{kept['id']}").json() == kept
        lost = httpx.get(f"{server.url}{PATH}/{running['id']}").json()
        assert lost["status"] == "failed"
        assert "the server ended while this response was being made" in lost["error"]["message"]
        again = ask(server, "And of Italy?", previous_response_id=first["id"])
        assert again["output"][0]["content"] == second["output"][0]["content"]
        items = httpx.get(f"{server.url}{PATH}/{second['id']}/input_items").json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert not Path(f"{path}-wal").exists(), "a server that is stopped leaves one file"
    assert os.listdir(tmp_path) == ["responses.db"]
