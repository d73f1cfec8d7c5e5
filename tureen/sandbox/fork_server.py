"""The fork server: a process that has loaded what its workers need, and forks them. It reads nothing of a client.

A program becomes one by calling `main` when supervisor.py starts it, with the arguments CONTROL SETUP.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from tureen.sandbox import framing
from tureen.sandbox.limits import WorkerLimits, confine, die_with_parent

PING, READY = b"p", b"r"
"""Messages on the control socket. The server says READY once it is, and to answer a PING."""

FORK = struct.Struct("<Q")
"""Layout of the order to fork a worker of this number. Its descriptors come with the order, its connection first."""

ENDED = struct.Struct("<Qi")
"""Layout of a report: a worker's number, and its exit status; negative: the signal that ended it."""

BORN = struct.Struct("<I")
"""Layout of a worker's first message: its process id, sent with a descriptor of its process. READY follows once it is
confined."""

MAX_DESCRIPTORS = 4

Handle = Callable[[bytes], bytes]
"""A function that answers each message to a worker by one message. The end of its connection ends the worker."""


Workers = dict[int, tuple[int, int]]
"""A process by its descriptor: its id, and the worker's number."""


class Program(NamedTuple):
    """The work of a fork server's workers."""

    limits: WorkerLimits
    open: Callable[[Sequence[int]], Handle]  # called in each worker, with the descriptors that came for it


def main(make_program: Callable[[bytes], Program]) -> None:
    """Serves until the supervisor is gone. `make_program` gets the bytes that the supervisor was given as setup."""
    control, setup = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server decides when to stop; its end is ours
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise no process learns how a worker ended
    program = make_program(os.pread(setup, os.fstat(setup).st_size, 0))
    os.close(setup)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):  # the parent no longer waits
        control.send(READY)
        workers: Workers = {}
        try:
            _serve(control, program, workers)
        finally:
            for pid, _ in workers.values():  # no other process may be left to reap them
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _serve(control: socket.socket, program: Program, workers: Workers) -> None:
    """Raises OSError when the supervisor is gone."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                pid, number = workers.pop(ready)
                os.close(ready)
                control.send(ENDED.pack(number, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            said, descriptors, _, _ = socket.recv_fds(control, FORK.size, MAX_DESCRIPTORS)
            if not said:
                return
            if said == PING:
                control.send(READY)
                continue
            with contextlib.suppress(OSError):  # no room for a worker: its connection closes, and its user knows
                parent = os.getpid()
                if (pid := os.fork()) == 0:
                    _work(control, program, descriptors, parent, list(workers))
                process = os.pidfd_open(pid)
                workers[process] = (pid, *FORK.unpack(said))
                poll.register(process, select.POLLIN)
            for descriptor in descriptors:
                os.close(descriptor)


def _work(
    control: socket.socket, program: Program, descriptors: Sequence[int], parent: int, others: Sequence[int]
) -> NoReturn:
    """Is a worker, from the fork to its end. others: descriptors of other workers' processes."""
    try:
        control.detach()
        for descriptor in others:
            os.close(descriptor)
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
