"""The fork server: a process that has loaded what its workers need, and forks them. It reads nothing of a client.

A module that is to be one calls `main` when it is run: `python -I -m MODULE CONTROL SETUP`, started by supervisor.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from tureen.sandbox import framing
from tureen.sandbox.limits import WorkerLimits, confine, die_with_parent

FORK, PING, READY = b"f", b"p", b"r"
"""The messages on the control socket. FORK comes with the descriptors of a new worker, its connection first; READY is
said once, and a PING is answered by one."""

BORN = struct.Struct("<I")
"""A worker's first words are its process id, with a descriptor of its process; READY follows once it is confined."""

MAX_DESCRIPTORS = 4
PARENT = "TUREEN_SANDBOX_PARENT"

Handle = Callable[[bytes], bytes]
"""A worker answers each message by one. The end of its connection ends it."""


class Program(NamedTuple):
    """The work of a fork server's workers."""

    limits: WorkerLimits
    open: Callable[[Sequence[int]], Handle]  # called in each worker, with the descriptors that came for it


def main(make_program: Callable[[bytes], Program]) -> None:
    """Serve until the supervisor is gone. `make_program` gets what the supervisor was given as setup."""
    control, setup = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server decides when to stop; its end is ours
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave nothing to be reaped
    die_with_parent(int(os.environ.pop(PARENT)))
    program = make_program(os.pread(setup, os.fstat(setup).st_size, 0))
    os.close(setup)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):  # nobody waits any more
        control.send(READY)
        _serve(control, program)


def _serve(control: socket.socket, program: Program) -> None:
    """Raises OSError when the supervisor is gone."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(control, 1, MAX_DESCRIPTORS)
        if not said:
            return
        if said == PING:
            control.send(READY)
            continue
        with contextlib.suppress(OSError):  # no room for a worker: its connection closes, and its user knows
            parent = os.getpid()
            if os.fork() == 0:
                _work(control, program, descriptors, parent)
        for one in descriptors:
            os.close(one)


def _work(control: socket.socket, program: Program, descriptors: Sequence[int], parent: int) -> NoReturn:
    try:
        control.detach()
        os.close(int(sys.argv[1]))
        die_with_parent(parent)
        connection = socket.socket(fileno=descriptors[0])
        handle = program.open(descriptors[1:])
        process = os.pidfd_open(os.getpid())
        socket.send_fds(connection, [BORN.pack(os.getpid())], [process])
        os.close(process)
        confine(program.limits, connection.fileno())
        connection.sendall(READY)
        while (message := framing.receive(connection)) is not None:
            framing.send(connection, handle(message))
    finally:
        os._exit(0)
