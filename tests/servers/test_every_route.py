"""Every route of a server with two fronts and two replicas that keeps all it can: none has an internal error."""

from __future__ import annotations

import httpx
import pytest
from patience import wait_until
from server_process import ServerProcess

TIMEOUT_S = 240
STREAMS = {"/status/live"}
"""They end with the client."""


@pytest.fixture
def server(tmp_path, default_model_source):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    flags = {"--kv-disk": "kv", "--usage-db": "use.db", "--responses-store": "responses.db", "--batch-path": "batches"}
    flags["--sessions-db"] = "sessions.db"
    paths = [word for flag, name in flags.items() for word in (flag, str(folder / name))]
    with ServerProcess(*paths, "--api-workers", "2", "--replicas", "2", cwd=folder) as running:  # where profiles go
        yield running.wait_ready()


def routes(server: ServerProcess, method: str) -> list[str]:
    paths = httpx.get(f"{server.url}/openapi.json").raise_for_status().json()["paths"]
    return [path for path, methods in paths.items() if method in methods and path not in STREAMS]


def answered(server: ServerProcess, method: str, path: str, **body: object) -> int:
    """The status of an answer; while the engine does not get to run it is asked again."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(httpx.request(method, f"{server.url}{path}", timeout=TIMEOUT_S, **body))
        return answers[-1].status_code != 503 or "engine_suspect" not in answers[-1].text

    wait_until(is_answered, f"an answer of {path}")
    return answers[-1].status_code


def test_no_page_no_list_and_no_empty_body_is_an_internal_error(server):
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 4}}
    httpx.post(f"{server.url}/generate", json=body, timeout=TIMEOUT_S)
    statuses = {("GET", path): answered(server, "GET", path) for path in routes(server, "get")}
    state, *_ = httpx.get(f"{server.url}/server_info", timeout=TIMEOUT_S).json()["internal_states"]
    assert state["num_pages"] > 0
    assert isinstance(state["kv_disk"], dict)
    statuses |= {("POST", path): answered(server, "POST", path, json={}) for path in routes(server, "post")}
    assert len(statuses) > 60
    assert {route: status for route, status in statuses.items() if status >= 500} == {}
