"""A server that cannot start says why in one line, with the fix, and exits with status 1. More faults are in
tests/test_start_refusals.py, without a process."""

from __future__ import annotations

import socket
import subprocess
import sys

from patience import PATIENCE_S


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tureen", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def fault_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tureen: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_port_in_use_is_named_with_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fault_line(run("--port", str(port)))
    assert str(port) in line
    assert "--port" in line


def test_a_kv_cache_that_does_not_fit_is_refused_by_the_engine_s_process_with_the_flag_to_change(default_model_source):
    line = fault_line(run("--max-total-tokens", str(10**9), "--port", "0", "--engine", "process"))
    assert "--max-total-tokens" in line
