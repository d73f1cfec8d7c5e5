"""A server of the chat's own, in a child process that ends with it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from tureen.cli.chat.connection import ServerAddress
from tureen.errors import StartupError
from tureen.sandbox import child_process
from tureen.temporary_folder import TemporaryFolder

POLL_S = 0.05
STOP_TIMEOUT_S = 10.0


@contextmanager
def own_server(flags: Sequence[str], *, api_key: str | None) -> Iterator[ServerAddress]:
    """Starts `tureen serve` with the flags on a Unix socket that only this user can open. Raises StartupError with what
    the server said, where it does not start."""
    with closing(TemporaryFolder("chat")) as folder, tempfile.TemporaryFile() as said:
        path = folder.path / "socket"
        arguments = ["serve", *flags, "--uds", str(path)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        process = child_process.start("tureen", *arguments, **streams, start_new_session=True)
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


def _last_line(said: bytes) -> str:
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("tureen: ") if lines else "the server ended without a message"
