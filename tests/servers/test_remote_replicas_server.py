"""The real server over two engines that other commands run: they are killed, and every output is that of an
undisturbed run."""

from __future__ import annotations

import os
import re
import signal

import httpx
from followers import PATIENCE_S, engines, follow_all, states, streams, wait_until
from free_ports import free_port
from server_process import ServerProcess

STREAMS = {name: body for name, body in streams(48).items() if name != "adapter"}


class EngineProcess(ServerProcess):
    """`tureen engine` on a port."""

    def __init__(self, port: int) -> None:
        super().__init__(command=["engine", "--listen", f"127.0.0.1:{port}"])

    @property
    def address(self) -> str:
        return re.search(r"tcp://127\.0\.0\.1:\d+", self.output).group()

    def wait_listening(self) -> EngineProcess:
        wait_until(lambda: "takes requests of servers at" in self.output or self.process.poll() is not None, "a start")
        assert self.process.poll() is None, self.output
        return self


def test_a_killed_engine_and_a_killed_machine_lose_nothing_and_are_used_again(default_model_source):
    hosts = [EngineProcess(free_port()).wait_listening() for _ in range(2)]
    addresses = ",".join(one.address for one in hosts)
    try:
        with ServerProcess("--replicas", addresses, "--grammar-compile-timeout-s", "120") as server:
            server.wait_ready()
            assert engines(server) == []
            undisturbed = follow_all(server, STREAMS)
            (before,) = engines(hosts[0])
            assert follow_all(server, STREAMS, lambda: os.kill(before, signal.SIGKILL)) == undisturbed
            wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")
            assert engines(hosts[0]) != [before]

            port = int(hosts[1].address.rpartition(":")[2])
            assert follow_all(server, STREAMS, lambda: os.killpg(hosts[1].process.pid, signal.SIGKILL)) == undisturbed
            hosts[1].stop()
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
            hosts[1] = EngineProcess(port).wait_listening()
            wait_until(lambda: states(server) == ["healthy", "healthy"], "it is used again")
    finally:
        for one in hosts:
            one.stop()
