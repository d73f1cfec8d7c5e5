"""A command in a terminal of its own, as a person has it: keys go in, what it shows comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading

from timeouts import PATIENCE_S, wait_until

WHERE_IS_THE_CURSOR, AT_THE_TOP = b"\x1b[6n", b"\x1b[1;1R"
"""A question that every terminal answers, and the answer. Without it the prompt shows no toolbar."""

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")
"""Sequences with which the prompt paints itself: colours, cursor, modes."""


class TerminalSession:
    """Runs `tureen …` in a pseudo-terminal of 100 columns; a context manager."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._main, child = pty.openpty()
        termios.tcsetwinsize(child, (40, 100))
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        environment.pop("PROMPT_TOOLKIT_NO_CPR", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tureen", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment | (env or {}),
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(child)
        self._shown = b""
        self._read_to = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._main, 1 << 16)
            except OSError:  # the child has closed its side
                return
            if not piece:
                return
            asked_before = self._shown.count(WHERE_IS_THE_CURSOR)
            self._shown += piece
            for _ in range(self._shown.count(WHERE_IS_THE_CURSOR) - asked_before):
                os.write(self._main, AT_THE_TOP)

    @property
    def raw(self) -> str:
        return self._shown.decode("utf-8", "replace")

    @property
    def shown(self) -> str:
        """Everything that was shown, without colours and movements of the cursor."""
        return ESCAPES.sub("", self.raw)

    def keys(self, text: str) -> None:
        os.write(self._main, text.encode())

    def type(self, line: str) -> None:
        """Types a line and Enter, once there is a prompt."""
        self.wait_for_prompt()
        self.keys(f"{line}\r")

    def wait_for_prompt(self) -> None:
        """Waits for the line below a new prompt: before it, keys are not the prompt's."""
        self.wait_for("/help")

    def wait_for(self, text: str) -> str:
        """Waits until the text is shown behind what was waited for before; returns what stands between."""
        wait_until(lambda: text in self.shown[self._read_to :] or not self._reader.is_alive(), (text, self))
        rest = self.shown[self._read_to :]
        assert text in rest, self.shown
        before, _, _ = rest.partition(text)
        self._read_to += len(before) + len(text)
        return before

    def wait_ended(self) -> int:
        """Waits until it has ended and all that it has shown was read; returns its status."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def __repr__(self) -> str:
        return f"<terminal: {self.shown[-2000:]!r}>"

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._main)


def _own_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in a shell's background
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
