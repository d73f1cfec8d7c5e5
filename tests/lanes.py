"""The three lanes of the suite, and the rule that tests of the gate stay in their process.

A lane is a folder: `servers`, `ledgers`, and the gate, which is all the rest. While a test of the gate runs, an audit
hook records each process it starts, each signal it sends, and each socket it binds or connects. `pace.py` finds sleeps.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import inline_pictures
import pytest
from gate_exceptions import EXCEPTIONS

from tureen.media import loader
from tureen.requests import template_pool

TESTS = Path(__file__).parent
GATE, SERVERS, LEDGERS = "gate", "servers", "ledgers"
COMMANDS = {GATE: "make test", SERVERS: "make test-servers", LEDGERS: "make test-ledgers"}

PROCESS, SIGNAL, SOCKET = "starts a process", "sends a signal", "opens a socket"


def lane(path: Path) -> str:
    """Return the lane of a test file."""
    first = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return first if first in (SERVERS, LEDGERS) else GATE


def _starts(*_: object) -> str:
    return PROCESS


def _kills(_pid: int, number: int, *_: object) -> str | None:
    return SIGNAL if number else None


def _connects(connection: socket.socket, address: object, *_: object) -> str | None:
    return SOCKET if connection.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and address else None


EVENTS: dict[str, Callable[..., str | None]] = {
    "subprocess.Popen": _starts,
    "os.exec": _starts,
    "os.fork": _starts,
    "os.forkpty": _starts,
    "os.posix_spawn": _starts,
    "os.system": _starts,
    "os.kill": _kills,
    "os.killpg": _kills,
    "signal.pthread_kill": _kills,
    "socket.bind": _connects,
    "socket.connect": _connects,
}
"""Audit events of Python, and what each means for a test. `None` stands for a harmless call."""


class Watch:
    """Records what a test of the gate does that only tests of other lanes may do."""

    def __init__(self) -> None:
        self._acts: dict[str, str] | None = None
        sys.addaudithook(self._hear)

    def begin(self) -> None:
        self._acts = {}

    def end(self) -> dict[str, str]:
        """Return the acts since `begin`, each with the place of its first occurrence."""
        acts, self._acts = self._acts, None
        return acts or {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        acts, self._acts = self._acts, None
        try:
            yield
        finally:
            self._acts = acts

    def note(self, act: str) -> None:
        if self._acts is not None and act not in self._acts:
            self._acts[act] = _place()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        act = EVENTS[event](*arguments) if self._acts is not None and event in EVENTS else None
        if act is not None:
            self.note(act)


def _place() -> str:
    """Return the innermost line of this repository on the stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(TESTS.parent)) and ".venv" not in name and name != __file__:
            return f"{os.path.relpath(name, TESTS.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


WATCH = Watch()
CAN_HAVE_POOL = template_pool._can_have_pool
DECODERS = loader.Supervisor


def is_exception(test: str) -> bool:
    """Say whether `gate_exceptions.py` names the test or its file."""
    path, _, function = test.removeprefix("tests/").partition("::")
    return path in EXCEPTIONS or f"{path}::{function.partition('[')[0]}" in EXCEPTIONS


def complaint(acts: dict[str, str]) -> str:
    did = "; ".join(f"{act} ({place})" for act, place in acts.items())
    return f"a test of the gate {did}: rewrite it, or move it to tests/servers (CONTRIBUTING.md, Lanes)"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    is_gate = lane(item.path) == GATE
    template_pool._can_have_pool = (lambda: False) if is_gate else CAN_HAVE_POOL  # chat templates in this process
    before, after = (DECODERS, inline_pictures.supervisor)[:: 1 if is_gate else -1]
    if loader.Supervisor is before:  # a fixture may have taken another one
        loader.Supervisor = after
    if is_gate:
        WATCH.begin()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Fail a test of the gate for its acts. After the last test, pytest also ends the servers of other lanes."""
    acts = WATCH.end() if nextitem is None else {}
    result = yield
    acts |= WATCH.end()
    if acts and not is_exception(item.nodeid):
        pytest.fail(complaint(acts), pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """After a whole gate, name the lanes that were not run."""
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        terminalreporter.write_line("")
        terminalreporter.write_line(f"This was the gate. {COMMANDS[SERVERS]} runs real servers and processes.")
        terminalreporter.write_line(f"{COMMANDS[LEDGERS]} runs the large tables whose packages you changed.")
        terminalreporter.write_line("make test-all runs every lane, whatever you changed.")
