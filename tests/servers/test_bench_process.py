"""Facts about processes, against what this process knows of itself."""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from free_ports import free_port
from timeouts import wait_until

from tureen.bench.command import add_arguments, run
from tureen.bench.http import Address, BenchError
from tureen.bench.process import StartedServer, cpu_seconds, family, listener, memory
from tureen.errors import TureenError


def test_listeners_and_what_a_process_and_its_children_use_are_found():
    the_listener_of_a_port_is_found()
    a_familys_cpu_time_and_memory_include_its_children_and_a_process_that_is_gone_has_none()


def the_listener_of_a_port_is_found():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert listener(port) is None
        listening.listen()
        assert listener(port) == os.getpid()
    assert listener(port) is None


def a_familys_cpu_time_and_memory_include_its_children_and_a_process_that_is_gone_has_none():
    command = "b = bytearray(64 << 20)\nfor i in range(3_000_000): pass\nprint(flush=True)\ninput()"
    own, before = memory(os.getpid()), cpu_seconds(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert child.pid in family(os.getpid())
    assert memory(os.getpid()).resident > own.resident + 50
    assert cpu_seconds(os.getpid()) >= before + 0.02
    child.communicate(b"\n")
    assert child.pid not in family(os.getpid())
    assert cpu_seconds(os.getpid()) >= before + 0.02  # of children that ended, too
    assert (cpu_seconds(child.pid), memory(child.pid), cpu_seconds(None)) == (None, None, None)


def test_a_started_server_is_waited_for_and_ends_with_its_benchmark():
    a_server_that_ends_before_it_is_ready_or_cannot_be_run_is_reported()
    a_started_server_is_stopped_with_all_its_children()
    a_started_server_does_not_outlive_a_benchmark_that_is_told_to_end()


def a_server_that_ends_before_it_is_ready_or_cannot_be_run_is_reported():
    server = StartedServer(f"{sys.executable} -c \"print('no such model'); raise SystemExit(3)\"")
    with pytest.raises(BenchError, match=r"(?s)status 3.*no such model"):
        asyncio.run(server.ready(Address("http://127.0.0.1:9")))
    server.stop()
    with pytest.raises(BenchError, match="no-such-program-here"):
        StartedServer("no-such-program-here --port 1")


def a_started_server_is_stopped_with_all_its_children():
    port = free_port()
    script = (
        "import http.server, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
    )
    server = StartedServer(f'{sys.executable} -c "{script}"')
    ready_s = asyncio.run(server.ready(Address(f"http://127.0.0.1:{port}")))
    assert ready_s > 0
    members = family(server.pid)
    assert len(members) == 2
    server.stop()
    wait_until(lambda: not any(memory(pid) and memory(pid).resident for pid in members), "the end of all")
    wait_until(lambda: listener(port) is None, "the end of its socket")


def _options(*arguments):
    parser = argparse.ArgumentParser(prog="bench")
    add_arguments(parser)
    return parser.parse_args(arguments)


def a_started_server_does_not_outlive_a_benchmark_that_is_told_to_end():
    port = free_port()
    script = (
        "import http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(500); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
    )

    def end_once_started():
        wait_until(lambda: listener(port) is not None, "the start")
        os.kill(os.getpid(), signal.SIGTERM)

    ender = threading.Thread(target=end_once_started)
    ender.start()
    with pytest.raises(TureenError, match="SIGTERM"):
        run(_options("--url", f"http://127.0.0.1:{port}", "--start", f'{sys.executable} -c "{script}"'))
    ender.join()
    wait_until(lambda: listener(port) is None, "its end")
