"""The real server over two engines that other commands run, one of which has a role: they are killed, and every output
is that of a server without either."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
from followers import PATIENCE_S, TEXT, engines, follow_all, states, streams, wait_until
from free_ports import free_port
from server_process import ServerProcess

LEAST = "64"
LONG = {"sampling_params": {"max_new_tokens": 36, "ignore_eos": True, "temperature": 0.8, "sampling_seed": 7}}
STREAMS = {name: body for name, body in streams(36).items() if name != "adapter"} | {
    "long": {"text": TEXT * 6} | LONG,
    "long-scores": {"text": "Then " + TEXT * 6, "return_logprob": True} | LONG,
}
"""The two prompts of more than 64 tokens are computed by the engine without a role."""


class EngineProcess(ServerProcess):
    """`tureen engine` on a port."""

    def __init__(self, port: int, folder: Path, *flags: str) -> None:
        super().__init__(command=["engine", "--listen", f"127.0.0.1:{port}", "--kv-disk", str(folder), *flags])

    @property
    def address(self) -> str:
        return re.search(r"tcp://127\.0\.0\.1:\d+", self.output).group()

    def wait_listening(self) -> EngineProcess:
        wait_until(lambda: "servers reach it at" in self.output or self.process.poll() is not None, "a start")
        assert self.process.poll() is None, self.output
        return self


def roles(server: ServerProcess) -> list[str]:
    (model,) = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["models"]
    return [replica["role"] for replica in model["replicas"]]


def test_a_killed_engine_and_a_killed_machine_lose_nothing_and_are_used_again(server, tmp_path):
    expected = follow_all(server, STREAMS)
    decoding = tmp_path / "kv", "--role", "decode"
    hosts = [EngineProcess(free_port(), tmp_path / "kv"), EngineProcess(free_port(), *decoding)]
    addresses = ",".join(one.wait_listening().address for one in hosts)
    flags = "--prefill-min-tokens", LEAST, "--grammar-compile-timeout-s", "120"
    try:
        with ServerProcess("--replicas", addresses, *flags) as front:
            front.wait_ready()
            assert engines(front) == []
            assert roles(front) == ["both", "decode"]
            (before,) = engines(hosts[0])
            assert follow_all(front, STREAMS, lambda: os.kill(before, signal.SIGKILL)) == expected
            wait_until(lambda: states(front) == ["healthy", "healthy"], "it is replaced")
            assert engines(hosts[0]) != [before]

            port = int(hosts[1].address.rpartition(":")[2])
            assert follow_all(front, STREAMS, lambda: os.killpg(hosts[1].process.pid, signal.SIGKILL)) == expected
            hosts[1].stop()
            assert httpx.get(f"{front.url}/health", timeout=PATIENCE_S).status_code == 200
            hosts[1] = EngineProcess(port, *decoding).wait_listening()
            wait_until(lambda: states(front) == ["healthy", "healthy"], "it is used again")
    finally:
        for one in hosts:
            one.stop()
