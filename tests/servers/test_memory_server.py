"""A real server gives its memory back, as the system sees it, and answers afterwards as before."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, command_line
from timeouts import wait_until

LONG = {
    "input_ids": [[5 + (i + j) % 1000 for i in range(200)] for j in range(4)],
    "sampling_params": {"max_new_tokens": 1},
}
SHORT = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
BUSY = 503
"""No time to compile a constraint: a busy machine's answer, with which one asks again."""
CONSTRAINED = {"text": "A:", "sampling_params": {"json_schema": '{"type": "boolean"}', "max_new_tokens": 8}}


@pytest.fixture(scope="module")
def server(default_model_source):
    """With all there that comes after it is ready: what the first constraint needs, and the first of each request."""
    with ServerProcess("--engine", "process", "--kernels", "native") as running:
        running.wait_ready()
        for body in (CONSTRAINED, SHORT, LONG):
            answers = (post(running, "/generate", **body) for _ in range(10))
            answer = next((one for one in answers if one.status_code != BUSY), None)
            assert answer is not None, running.output
            assert answer.status_code == 200, answer.text
        yield running


def anonymous_mib(server: ServerProcess) -> float:
    """Memory of the server and its engine that is of no file, such as the KV cache and packed weights; the system may
    drop a file's pages whenever it likes."""
    engines = [pid for pid in server.children() if "tureen.serving.child" in command_line(pid)]
    total_kib = 0
    for pid in (server.process.pid, *engines):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return total_kib / 1024


def kv_mib(server: ServerProcess) -> float:
    """Of the long prompts."""
    memory = httpx.get(f"{server.url}/v1/loads").json()["loads"][0]["memory"]
    num_tokens = sum(map(len, LONG["input_ids"]))
    return num_tokens * memory["kv_cache_gb"] * 1024 / memory["token_capacity"]


def post(server: ServerProcess, path: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def test_memory_is_the_systems_again_and_exchanged_weights_leave_nothing_behind(server, default_model_source):
    weights_that_are_exchanged_again_and_again_leave_nothing_behind(server, default_model_source)
    memory_of_a_flushed_cache_and_released_memory_is_the_systems_again(server)


def memory_of_a_flushed_cache_and_released_memory_is_the_systems_again(server):
    post(server, "/generate", **LONG)
    full = anonymous_mib(server)
    assert post(server, "/flush_cache").status_code == 200
    empty = anonymous_mib(server)
    assert full - empty > 0.8 * kv_mib(server)
    expected = post(server, "/generate", **SHORT).json()["output_ids"]
    post(server, "/generate", **LONG)
    full = anonymous_mib(server)
    assert full - empty > 0.8 * kv_mib(server)
    assert post(server, "/release_memory_occupation", tags=["kv_cache"]).status_code == 200
    without_kv = anonymous_mib(server)
    assert full - without_kv > 0.8 * kv_mib(server)
    assert post(server, "/release_memory_occupation", tags=["weights"]).status_code == 200
    without_weights = anonymous_mib(server)
    assert without_kv - without_weights > 70  # 135M parameters of 4 and more bits
    assert post(server, "/generate", **SHORT).json()["error"]["code"] == "memory_released"
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "it is well")
    assert post(server, "/resume_memory_occupation").status_code == 200
    assert post(server, "/generate", **SHORT).json()["output_ids"] == expected


def weights_that_are_exchanged_again_and_again_leave_nothing_behind(server, default_model_source):
    expected = post(server, "/generate", **SHORT).json()["output_ids"]
    sizes = []
    for number in range(3):
        answer = post(
            server, "/update_weights_from_disk", model_path=str(default_model_source.path), weight_version=f"{number}"
        )
        assert answer.status_code == 200, answer.text
        found = post(server, "/generate", **SHORT).json()
        assert (found["output_ids"], found["meta_info"]["weight_version"]) == (expected, f"{number}")
        sizes.append(anonymous_mib(server))
    assert sizes[-1] - sizes[0] < 40
