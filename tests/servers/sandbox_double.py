"""A fork server whose workers do what a message says."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

from tureen.sandbox import fork_server
from tureen.sandbox.limits import WorkerLimits

LIMITS = {
    "open": WorkerLimits(memory_bytes=64 << 20, cpu_s=1),
    "sealed": WorkerLimits(memory_bytes=64 << 20, cpu_s=1, is_sealed=True),
}


def spin(_: str) -> str:
    while True:
        pass


def close(_: str) -> None:
    """All that it has open, and goes on."""
    os.closerange(0, 1000)
    time.sleep(1000)


def take_memory(size: str) -> str:
    try:
        return str(len(bytearray(int(size))))
    except MemoryError:
        return "MemoryError"


def attempt(what: str) -> str:
    """Does what no sealed worker may."""
    actions = {
        "open": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "dup": lambda: os.dup(0),
        "socket": lambda: socket.socket(),
        "fork": lambda: os.fork() or os._exit(0),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "kill": lambda: os.kill(os.getppid(), 0),
        "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
        "stop the alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
        "ignore the limit": lambda: signal.signal(signal.SIGXCPU, signal.SIG_IGN),
    }
    try:
        actions[what]()
    except (OSError, ValueError):
        return "refused"
    return "it worked"


ACTIONS = {
    "echo": lambda text: text,
    "size": lambda text: "x" * int(text),
    "pid": lambda _: str(os.getpid()),
    "environment": lambda _: json.dumps(dict(os.environ)),
    "spin": spin,
    "sleep": lambda _: time.sleep(1000),
    "memory": take_memory,
    "attempt": attempt,
    "exit": lambda _: os._exit(0),
    "crash": lambda _: ctypes.string_at(0),
    "close": close,
}


def make_program(setup: bytes) -> fork_server.Program:
    def open_(descriptors):
        def handle(message: bytes) -> bytes:
            what, _, rest = message.decode().partition(" ")
            if what == "descriptor":
                return os.pread(descriptors[0], 100, 0)
            if what == "setup":
                return setup
            return ACTIONS[what](rest).encode()

        return handle

    return fork_server.Program(LIMITS[setup.decode().split()[0]], open_)


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "sandbox_double.py"
    fork_server.main(make_program)
