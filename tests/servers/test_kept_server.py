"""What a server with two fronts and two replicas keeps on the disk is there after `kill -9`, and no route fails.

Each part of this file asks a server, yields, and gets the server that takes its place.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from server_process import ServerProcess, metric
from timeouts import PATIENCE_S, wait_until

ADMIN = {"authorization": "Bearer ADMIN"}
ADA = {"authorization": "Bearer KEY-ADA"}
RESPONSES = "/v1/responses"
ENDLESS_ROUTES = {"/status/live"}
"""They end with the client."""
TURNS = ("The largest river of South America is the", " Its mouth lies in")
PROMPT = "The Amazon is a river in South America. " * 12 + "Its mouth lies in"

Part = Generator[None, ServerProcess, None]


def get(server: ServerProcess, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", headers=ADMIN, timeout=PATIENCE_S).raise_for_status().json()


def post(server: ServerProcess, path: str, headers: dict[str, str] = ADMIN, **body: object) -> Any:
    return httpx.post(f"{server.url}{path}", headers=headers, json=body, timeout=PATIENCE_S).raise_for_status().json()


def use(server: ServerProcess) -> Part:
    """What clients used is known to the successor once the server says that it is written."""
    for _ in range(2):
        post(server, "/generate", ADA, text="Paris is", sampling_params={"max_new_tokens": 8})
    wait_until(lambda: get(server, "/usage")["unwritten_requests"] == 0, "it is written")
    [before] = [client for client in get(server, "/usage")["clients"] if client["client"] == "ada"]
    assert before["requests"] == 2
    server = yield
    assert before in get(server, "/usage")["clients"]


def turn_of_a_session(server: ServerProcess, number: int) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": 12}
    session = {"id": "rivers", "rid": None if number == 0 else "0"}
    answer = post(
        server, "/generate", text=TURNS[number], rid=str(number), sampling_params=params, session_params=session
    )
    assert "session_changes" not in answer["meta_info"]
    return answer["output_ids"]


def durable_session(server: ServerProcess, expected: list[list[int]]) -> Part:
    """tests/api/test_durable_sessions.py has other settings."""
    post(server, "/open_session", capacity_of_str_len=4000, session_id="rivers", durable=True)
    assert turn_of_a_session(server, 0) == expected[0]
    server = yield
    assert turn_of_a_session(server, 1) == expected[1]


def response(server: ServerProcess, said: str, **body: object) -> dict:
    return post(server, RESPONSES, input=said, max_output_tokens=8, temperature=0, **body)


def last_response(server: ServerProcess, said: str) -> dict:
    """Stream a response. Kill the server when the last event arrives."""
    asked = {"input": said, "max_output_tokens": 8, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}{RESPONSES}", headers=ADMIN, json=asked, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") in ("response.completed", "response.incomplete"):
                server.process.kill()
                return event["response"]
    raise AssertionError("the stream had no end")


def responses(server: ServerProcess) -> Part:
    """No response that a client saw end is lost, and a running one is reported as failed. Kills the server."""
    first = response(server, "What is the capital of France?")
    second = response(server, "And of Italy?", previous_response_id=first["id"])
    body = {"background": True, "max_output_tokens": 4000, "ignore_eos": True, "temperature": 0}
    running = f"{RESPONSES}/{post(server, RESPONSES, input='Tell me a long story.', **body)['id']}"
    wait_until(lambda: get(server, running)["status"] == "in_progress", "the response in the background runs")
    last = last_response(server, "What is the capital of Spain?")
    server = yield
    for kept in (first, second, last):
        assert get(server, f"{RESPONSES}/{kept['id']}") == kept
    lost = get(server, running)
    assert lost["status"] == "failed"
    assert "the server ended while it generated this response" in lost["error"]["message"]
    again = response(server, "And of Italy?", previous_response_id=first["id"])
    assert again["output"][0]["content"] == second["output"][0]["content"]
    items = get(server, f"{RESPONSES}/{second['id']}/input_items")["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]


def no_route_fails(server: ServerProcess) -> None:
    """Ask every route that needs no field, and post an empty body to the others."""
    state, *_ = get(server, "/server_info")["internal_states"]
    assert state["num_pages"] > 0
    assert isinstance(state["kv_disk"], dict)
    paths = get(server, "/openapi.json")["paths"]
    asked = [("GET", path, {}) for path, methods in paths.items() if "get" in methods and path not in ENDLESS_ROUTES]
    asked += [("POST", path, {"json": {}}) for path, methods in paths.items() if "post" in methods]
    statuses = {(method, path): answered(server, method, path, **body) for method, path, body in asked}
    assert len(statuses) > 60
    assert {route: status for route, status in statuses.items() if status >= 500} == {}


def answered(server: ServerProcess, method: str, path: str, **body: object) -> int:
    """Return the status of an answer. Ask again while the engine is suspect."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(httpx.request(method, f"{server.url}{path}", headers=ADMIN, timeout=PATIENCE_S, **body))
        return answers[-1].status_code != 503 or "engine_suspect" not in answers[-1].text

    wait_until(is_answered, f"an answer of {path}")
    return answers[-1].status_code


class Kept:
    """The folder of what servers keep, and the servers that keep it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        (folder / "keys").write_text("ada KEY-ADA\n")
        (folder / "keys").chmod(0o600)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    @contextmanager
    def server(self, *flags: str):
        keys = ("--api-key-file", self.path("keys"), "--admin-api-key", "ADMIN")
        stores = ("--kv-disk", self.path("kv"), "--usage-db", self.path("usage.db"), "--batch-path", self.path("lines"))
        more = ("--responses-store", self.path("responses.db"), "--sessions-db", self.path("sessions.db"))
        with ServerProcess(*keys, *stores, *more, *flags, cwd=self.folder) as running:  # where profiles go
            yield running.wait_ready()


def cached(server: ServerProcess, **fields: object) -> tuple[str, int, int]:
    params = {"temperature": 0, "max_new_tokens": 12}
    answer = post(server, "/generate", text=PROMPT, sampling_params=params, **fields)
    return answer["text"], answer["meta_info"]["cached_tokens"], answer["meta_info"]["prompt_tokens"]


def test_what_is_kept_outlives_kill_9_and_a_stop_and_no_route_has_an_internal_error(server, tmp_path):
    """`server` is the one to which nothing happens."""
    post(server, "/open_session", capacity_of_str_len=4000, session_id="rivers")
    expected = [turn_of_a_session(server, number) for number in range(len(TURNS))]
    closing = {"session_id": "rivers"}
    httpx.post(f"{server.url}/close_session", json=closing, timeout=PATIENCE_S).raise_for_status()
    kept = Kept(tmp_path / "kept")
    two = ("--api-workers", "2", "--replicas", "2")
    with kept.server(*two) as killed:
        parts = [use(killed), durable_session(killed, expected), responses(killed)]
        for part in parts:
            next(part)
        killed.process.wait(PATIENCE_S)
    assert stat.S_IMODE(Path(kept.path("responses.db")).stat().st_mode) == 0o600
    with kept.server(*two) as next_one:
        for part in parts:
            next_one.wait_ready()
            with_end(part, next_one)
        first, num_cached, _ = cached(next_one)
        assert num_cached == 0
        no_route_fails(next_one)
    left = [path.name for path in kept.folder.glob("responses.db*")]
    assert left == ["responses.db"], "a server that is stopped leaves one file"
    pages_come_back(kept, first)


def with_end(part: Part, server: ServerProcess) -> None:
    try:
        part.send(server)
    except StopIteration:
        return
    raise AssertionError("a part yields once")


def pages_come_back(kept: Kept, first: str) -> None:
    """A prompt comes back after a restart for this user and salt alone."""
    folder = Path(kept.path("kv"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    with kept.server() as again:
        text, num_cached, num_prompt = cached(again)
        assert text == first
        assert num_prompt - 16 <= num_cached < num_prompt
        [model] = get(again, "/status")["models"]
        assert model["kv_disk"]["total_loaded"] == num_cached // 16
        assert metric(again.url, "sglang:kv_disk_loaded_pages_total") == num_cached // 16
        assert cached(again, cache_salt="another")[:2] == (first, 0)
