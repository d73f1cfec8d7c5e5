"""SGLang's gateway (Shepherd Model Gateway) in front of the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from timeouts import wait_until

CLIENT = "Shepherd Model Gateway (SGLang's router)"
PACKAGES = ("smg",)
PATIENCE_S = 180
SETTINGS = ["--policy", "cache_aware", "--load-monitor-interval", "1"]


@pytest.fixture
def gateway(url: str, tmp_path: Path) -> Iterator[str]:
    """The address of a gateway that has found the server."""
    port, metrics_port = free_ports(2)
    address = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", url, "--prometheus-port", str(metrics_port), *SETTINGS]
    with (tmp_path / "gateway.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: num_workers(address) == 1, "the gateway finds the server")
            yield address
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def num_workers(address: str) -> int:
    try:
        return int(httpx.get(f"{address}/workers").json()["total"])
    except httpx.TransportError:
        return 0


def ask(gateway: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{gateway}{path}", json=body, timeout=PATIENCE_S)


def test_generates_streams_and_chats_through_it(gateway, url):
    params = {"temperature": 0, "max_new_tokens": 6}
    answer = ask(gateway, "/generate", text="The capital of France is", sampling_params=params).json()
    assert "Paris" in answer["text"]
    streamed = ask(gateway, "/generate", text="The capital of France is", sampling_params=params, stream=True)
    *events, end = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert json.loads(events[-1])["output_ids"] == answer["output_ids"]
    assert end == "[DONE]"
    (model,) = httpx.get(f"{gateway}/v1/models").json()["data"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = ask(gateway, "/v1/chat/completions", model=model["id"], messages=messages, max_tokens=8, temperature=0)
    assert "Paris" in chat.json()["choices"][0]["message"]["content"]


def test_reads_the_load_of_the_server(gateway, url):
    def loads() -> list[dict]:
        return httpx.get(f"{gateway}/get_loads").json()["loads"]

    wait_until(lambda: loads(), "the load")
    assert httpx.post(f"{gateway}/flush_cache").json()["workers_flushed"] == 1
