"""A real `tureen serve` process for the end-to-end tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import costs
import httpx
from timeouts import PATIENCE_S, wait_until

PATIENT_SANDBOX = {"PYTHONPATH": str(Path(__file__).parent / "patient")}
"""Environment of a server whose clients send code, which a busy machine lets wait."""


class ServerProcess:
    """Starts the server on a free port, collects what it prints, stops it at the end."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        threads: int | None = 1,
        cwd: Path | None = None,
        python: str = sys.executable,
        command: Sequence[str] = ("serve", "--port", "0"),
    ) -> None:
        """threads: of the engine, or None for its default. One thread leaves processors to concurrent tests."""
        costs.STARTED.append(" ".join((*command, *arguments)))
        number_of_threads = {} if threads is None else {"TUREEN_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [python, "-m", "tureen", *command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | number_of_threads | (env or {}),
            cwd=cwd,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.output)
        if found is None:
            raise AssertionError(f"the server printed no URL:\n{self.output}")
        return found.group()

    def wait_started(self) -> ServerProcess:
        """It has said where it is."""
        wait_until(lambda: "ready at" in self.output or self.process.poll() is not None, "the start")
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output}")
        return self

    def wait_ready(self) -> ServerProcess:
        self.wait_started()
        wait_until(lambda: httpx.get(f"{self.url}/health").status_code == 200, "health")
        return self

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")  # each thread lists the processes it started
        listed = [int(word) for task in tasks for word in task.read_text().split()]
        return [pid for pid in sorted(listed) if "resource_tracker" not in command_line(pid)]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def metric(url: str, name: str) -> float:
    """The sum over labels of one metric."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(re.escape(name) + r"(\{|\s)", line)]
    if not found:
        raise AssertionError(f"no metric {name}")
    return sum(found)
