"""Every route of a server with everything that keeps something switched on: none of them has an internal error."""

from __future__ import annotations

import httpx
import pytest
from patience import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.e2e

TIMEOUT_S = 240
STREAMS = {"/status/live"}
"""They end with the client."""


@pytest.fixture(
    scope="module", params=[("--api-workers", "2"), ("--replicas", "2")], ids=["two fronts", "two replicas"]
)
def server(request, tmp_path_factory, default_model_source):
    folder = tmp_path_factory.mktemp("kept")
    folder.chmod(0o700)
    flags = {"--kv-disk": "kv", "--usage-db": "use.db", "--responses-store": "responses.db", "--batch-path": "batches"}
    flags["--sessions-db"] = "sessions.db"
    paths = [word for flag, name in flags.items() for word in (flag, str(folder / name))]
    with ServerProcess(*paths, *request.param, cwd=folder) as running:  # where profiles go
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


def test_no_page_and_no_list_is_an_internal_error(server):
    httpx.post(
        f"{server.url}/generate", json={"text": "Hi", "sampling_params": {"max_new_tokens": 4}}, timeout=TIMEOUT_S
    )
    statuses = {path: answered(server, "GET", path) for path in routes(server, "get")}
    assert len(statuses) > 30
    assert {path: status for path, status in statuses.items() if status >= 500} == {}


def test_an_empty_body_is_no_internal_error_for_any_route(server):
    statuses = {path: answered(server, "POST", path, json={}) for path in routes(server, "post")}
    assert len(statuses) > 30
    assert {path: status for path, status in statuses.items() if status >= 500} == {}


def test_the_engine_s_figures_have_names(server):
    [state] = httpx.get(f"{server.url}/server_info", timeout=TIMEOUT_S).json()["internal_states"]
    assert state["num_pages"] > 0
    assert isinstance(state["kv_disk"], dict)
