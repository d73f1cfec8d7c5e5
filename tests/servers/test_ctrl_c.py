"""Ctrl-C in a terminal: once says how long it waits, twice leaves; never a traceback, at no moment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

from terminal_session import TerminalSession
from timeouts import PATIENCE_S

CTRL_C = "\x03"


def begin_stream(path: str) -> socket.socket:
    """A connection over which a long answer has begun."""
    body = json.dumps({"text": "Once", "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}})
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    client.sendall(f"{head}\r\n\r\n{body}".encode())
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return client


def drain(client: socket.socket) -> None:
    while client.recv(1 << 16):
        pass


def serve(tmp_path, *more: str) -> TerminalSession:
    return TerminalSession("serve", "--uds", str(tmp_path / "s"), "--device", "cpu", *more)


def test_ctrl_c_in_a_terminal_says_what_it_waits_for_and_shows_no_traceback(tmp_path):
    once_with_nothing_running_ends_at_once(tmp_path)
    once_says_how_long_it_waits_and_twice_leaves(tmp_path)
    while_the_model_is_loaded_it_leaves_without_a_traceback(tmp_path)


def once_with_nothing_running_ends_at_once(tmp_path):
    with serve(tmp_path) as terminal:
        terminal.wait_for("ready at unix:")
        terminal.keys(CTRL_C)
        terminal.wait_for("SIGINT: ending; no request was running")
        assert terminal.wait_ended() == 0
        assert "Traceback" not in terminal.shown
    assert not (tmp_path / "s").exists()


def once_says_how_long_it_waits_and_twice_leaves(tmp_path):
    with serve(tmp_path, "--drain-timeout-s", "600") as terminal:
        terminal.wait_for("ready at unix:")
        with begin_stream(str(tmp_path / "s")) as client:
            reader = threading.Thread(target=drain, args=(client,))
            reader.start()
            terminal.keys(CTRL_C)
            terminal.wait_for("finishing 1 requests within 600 s; accepting no new ones; Ctrl-C again ends them now")
            terminal.keys(CTRL_C)
            terminal.wait_for("second signal: stopping now")
            terminal.wait_ended()
            reader.join(PATIENCE_S)
        assert "Traceback" not in terminal.shown
    assert not (tmp_path / "s").exists()


def while_the_model_is_loaded_it_leaves_without_a_traceback(tmp_path):
    for phase, times in (("build tokenizer", 1), ("load weights", 3)):
        with serve(tmp_path) as terminal:
            terminal.wait_for(phase)
            for _ in range(times):
                terminal.keys(CTRL_C)
            terminal.wait_ended()
            assert "Traceback" not in terminal.shown
            assert "Exception ignored" not in terminal.shown


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
"""


def test_while_modules_are_imported_it_leaves_without_a_traceback(tmp_path):
    for program, module in (("tureen", "tureen.cli"), ("tureen.launch_server", "tureen.config")):
        (tmp_path / "sitecustomize.py").write_text(INTERRUPTED.format(module=module))
        command = [sys.executable, "-m", program, "serve", "--help"]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, b"", b""), program


STUCK = """
import ctypes, sys, threading

def wait(event, arguments):
    if event == "open" and {file!r} in str(arguments[0]).replace("__pycache__/", ""):
        print("a step takes for ever", file=sys.stderr, flush=True)
        {wait}

sys.addaudithook(wait)
"""
"""A `sitecustomize` with which the thread that opens a file never ends."""

PYTHON, C = "threading.Event().wait()", "ctypes.PyDLL(None).sleep(1000000)"
"""What never ends in it. The call of C holds the interpreter: no other thread runs, and no signal handler of Python."""

MODEL, SHELL, WEIGHTS = ".gguf", "app/application.", "runner/native."
"""Files that are opened when a model is found, while its weights are loaded, and by what loads them."""


def end_in_step(folder, file: str, sign: signal.Signals, *command: str, wait: str) -> int:
    """End a command while a thread of it is in the step that opens a file. Return the exit status."""
    temporary = folder / "temporary"
    temporary.mkdir()
    (folder / "sitecustomize.py").write_text(STUCK.format(file=file, wait=wait))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = tuple(str(folder / word) if word == "s" else word for word in command)
    with TerminalSession(*command, env={"PYTHONPATH": path, "TMPDIR": str(temporary)}) as terminal:
        terminal.wait_for("a step takes for ever")
        os.kill(terminal.process.pid, sign)
        status = terminal.wait_ended()
        assert "Traceback" not in terminal.shown
    assert list(temporary.iterdir()) == []
    return status


SERVE = ("serve", "--uds", "s", "--device", "cpu")
BUSY_STARTS = (
    (SERVE, MODEL, signal.SIGINT, PYTHON),
    (SERVE, WEIGHTS, signal.SIGTERM, PYTHON),
    ((*SERVE, "--engine", "process"), WEIGHTS, signal.SIGINT, PYTHON),
    ((*SERVE, "--api-workers", "2"), SHELL, signal.SIGTERM, PYTHON),
    ((*SERVE, "--api-workers", "2"), SHELL, signal.SIGINT, PYTHON),
    (SERVE, MODEL, signal.SIGTERM, C),
    (SERVE, WEIGHTS, signal.SIGINT, C),
    ((*SERVE, "--api-workers", "2"), MODEL, signal.SIGTERM, C),
    (("engine", "--listen", "127.0.0.1:0", "--device", "cpu"), WEIGHTS, signal.SIGINT, PYTHON),
    (("engine", "--listen", "127.0.0.1:0", "--device", "cpu"), WEIGHTS, signal.SIGTERM, PYTHON),
)
"""Commands, the file in whose step a thread of each is, the signal that ends it, and what the thread does there."""


def test_a_signal_ends_a_start_that_threads_are_busy_with_or_in_which_a_step_holds_the_interpreter(tmp_path):
    statuses = []
    for number, (command, file, sign, wait) in enumerate(BUSY_STARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        statuses.append(end_in_step(folder, file, sign, *command, wait=wait))
    assert statuses == [-sign for _, _, sign, _ in BUSY_STARTS]
