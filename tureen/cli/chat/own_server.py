"""A server of the chat's own, in a child process that ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tureen.cli.chat.connection import ServerAddress
from tureen.errors import StartupError
from tureen.sandbox import seccomp

POLL_S = 0.05
STOP_TIMEOUT_S = 10.0


@contextmanager
def own_server(flags: Sequence[str], *, api_key: str | None) -> Iterator[ServerAddress]:
    """Starts `tureen serve` with the flags on a Unix socket that only this user can open. Raises StartupError with what
    the server said, where it does not start."""
    with tempfile.TemporaryDirectory(prefix="tureen-chat-") as folder, tempfile.TemporaryFile() as said:
        path = Path(folder) / "socket"
        command = [sys.executable, "-m", "tureen", "serve", *flags, "--uds", str(path)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            server = ServerAddress(f"unix:{path}", api_key=api_key)
            while not (path.exists() and server.answers()):
                if process.poll() is not None:
                    said.seek(0)
                    raise StartupError(_last_line(said.read()))
                time.sleep(POLL_S)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_parent() -> None:
    """Has the system end the new process when the chat is killed, or its terminal is closed."""
    if sys.platform == "linux":
        seccomp.control(seccomp.PR_SET_PDEATHSIG, signal.SIGTERM)


def _last_line(said: bytes) -> str:
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("tureen: ") if lines else "the server ended without a word"
