"""A real server gives its memory back, as the system sees it, and answers afterwards as before."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.e2e

MIB = 1 << 20
LONG = {
    "input_ids": [[5 + (i + j) % 1000 for i in range(200)] for j in range(4)],
    "sampling_params": {"max_new_tokens": 1},
}
SHORT = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request, default_model_source):
    with ServerProcess("--engine", request.param, "--kernels", "native") as running:
        yield running.wait_ready()


def resident_mib(server: ServerProcess) -> float:
    """Of the server and its engine."""
    pids = [server.process.pid, *server.children()]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / MIB


def post(server: ServerProcess, path: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def test_released_memory_is_the_systems_again(server):
    expected = post(server, "/generate", **SHORT).json()["output_ids"]
    post(server, "/generate", **LONG)
    info = httpx.get(f"{server.url}/v1/loads").json()["loads"][0]["memory"]
    kv_mib = 800 * info["kv_cache_gb"] * 1024 / info["token_capacity"]  # of the long prompts
    full = resident_mib(server)
    assert post(server, "/release_memory_occupation", tags=["kv_cache"]).status_code == 200
    without_kv = resident_mib(server)
    assert full - without_kv > 0.8 * kv_mib
    assert post(server, "/release_memory_occupation", tags=["weights"]).status_code == 200
    without_weights = resident_mib(server)
    assert without_kv - without_weights > 70  # 135M parameters of 4 and more bits
    assert post(server, "/generate", **SHORT).json()["error"]["code"] == "memory_released"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert post(server, "/resume_memory_occupation").status_code == 200
    assert post(server, "/generate", **SHORT).json()["output_ids"] == expected


def test_weights_that_are_exchanged_again_and_again_leave_nothing_behind(server, default_model_source):
    expected = post(server, "/generate", **SHORT).json()["output_ids"]
    sizes = []
    for number in range(3):
        answer = post(
            server, "/update_weights_from_disk", model_path=str(default_model_source.path), weight_version=f"{number}"
        )
        assert answer.status_code == 200, answer.text
        found = post(server, "/generate", **SHORT).json()
        assert (found["output_ids"], found["meta_info"]["weight_version"]) == (expected, f"{number}")
        sizes.append(resident_mib(server))
    assert sizes[-1] - sizes[0] < 40
