"""A server that cannot start says why in one line, with the fix, and exits with status 1. More faults are in
tests/test_start_refusals.py, without a process."""

from __future__ import annotations

import socket
import subprocess
import sys

from throwaway_ca import EXPIRED, Authority
from timeouts import PATIENCE_S


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tureen", "serve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, check=False
    )


def fault_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tureen: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_fault_of_a_port_a_file_or_the_memory_ends_the_start_with_one_line_and_status_1(
    default_model_source, tmp_path
):
    a_port_in_use_is_named_with_a_free_one()
    a_kv_cache_that_does_not_fit_is_refused_by_the_engine_s_process_with_the_flag_to_change()
    a_fault_in_a_file_of_tls_is_named_by_its_path(tmp_path)


def a_port_in_use_is_named_with_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fault_line(run("--port", str(port)))
    assert str(port) in line
    assert "--port" in line


def a_kv_cache_that_does_not_fit_is_refused_by_the_engine_s_process_with_the_flag_to_change():
    line = fault_line(run("--max-total-tokens", str(10**9), "--port", "0", "--engine", "process"))
    assert "--max-total-tokens" in line


def a_fault_in_a_file_of_tls_is_named_by_its_path(tmp_path):
    ca = Authority(tmp_path)
    for pair in (ca.issue("old", for_server=True, valid=EXPIRED), ca.issue("locked", for_server=True, password="x")):
        line = fault_line(run("--port", "0", "--tls-cert", pair.cert, "--tls-key", pair.key))
        assert pair.cert in line or pair.key in line
