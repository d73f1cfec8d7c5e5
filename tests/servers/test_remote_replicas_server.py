"""The real server over two engines that other commands run: they are killed, and every output is that of an
undisturbed run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest
from followers import PATIENCE_S, engines, follow_all, states, streams, wait_until
from free_ports import free_port
from server_process import ServerProcess

pytestmark = pytest.mark.e2e

STREAMS = {name: body for name, body in streams(120).items() if name != "adapter"}


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


@pytest.fixture(scope="module")
def hosts(default_model_source) -> Iterator[list[EngineProcess]]:
    running = [EngineProcess(free_port()).wait_listening() for _ in range(2)]
    yield running
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def server(hosts) -> Iterator[ServerProcess]:
    addresses = ",".join(one.address for one in hosts)
    with ServerProcess("--replicas", addresses, "--grammar-compile-timeout-s", "120") as running:
        running.wait_ready()
        assert engines(running) == []
        yield running


@pytest.fixture(scope="module")
def undisturbed(server) -> dict[str, list[tuple]]:
    follow_all(server, STREAMS)  # what is slow only once: the grammar
    return follow_all(server, STREAMS)


def test_a_killed_engine_loses_nothing_and_its_command_starts_another(server, hosts, undisturbed):
    (before,) = engines(hosts[0])
    assert follow_all(server, STREAMS, lambda: os.kill(before, signal.SIGKILL)) == undisturbed
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")
    assert engines(hosts[0]) != [before]


def test_a_killed_machine_loses_nothing_and_is_used_again_when_it_is_back(server, hosts, undisturbed):
    port = int(hosts[1].address.rpartition(":")[2])
    assert follow_all(server, STREAMS, lambda: os.killpg(hosts[1].process.pid, signal.SIGKILL)) == undisturbed
    hosts[1].stop()
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    hosts[1] = EngineProcess(port).wait_listening()
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it is used again")
    assert follow_all(server, STREAMS) == undisturbed
