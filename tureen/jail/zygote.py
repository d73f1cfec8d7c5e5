"""Started once: `python -I -m tureen.jail.zygote FD`. Has what processors need in memory, and forks workers.

It never runs anything of a client itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from types import ModuleType

import msgspec
import numpy
import numpy.random
import torch  # noqa: F401

from tureen.jail import wire, worker
from tureen.logit_processor import CustomLogitProcessor

np = numpy
"""A class of a client's main module finds the globals it uses here, in this process's main module: torch, np, …"""

COMMON = ("bisect", "collections", "copy", "dataclasses", "enum", "functools", "heapq", "itertools", "json", "math",
          "operator", "random", "re", "statistics", "string", "time", "typing")  # fmt: skip
"""What client code may import: nothing else can be loaded in the jail."""

SGLANG_NAME = "sglang.srt.sampling.custom_logit_processor"
MAX_DESCRIPTORS = 2

_decoder = msgspec.msgpack.Decoder(wire.ToZygote)


def main(descriptor: int) -> None:
    """Serve until the pool is gone; then end every worker."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # the server decides when to stop; its end is the end of the socket
    control = socket.socket(fileno=descriptor)
    for name in COMMON:
        globals()[name] = importlib.import_module(name)
    _stand_in_for_sglang()
    worker.warm_up()
    control.sendall(wire.reply(0, wire.DONE))
    pids: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, wire.HEADER.size, MAX_DESCRIPTORS)
        rest = wire.receive(control, wire.HEADER.size - len(data)) if data else None
        payload = None if rest is None else wire.receive(control, wire.HEADER.unpack(data + rest)[0])
        if payload is None:
            break
        message = _decoder.decode(payload)
        if isinstance(message, wire.Spawn):
            pid = _fork(message, descriptors, control)
            pids.add(pid)
            control.sendall(wire.reply(0, wire.DONE, str(pid)))
        elif message.pid in pids:
            pids.discard(message.pid)
            os.kill(message.pid, signal.SIGKILL)
            os.waitpid(message.pid, 0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _fork(message: wire.Spawn, descriptors: list[int], control: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        control.detach()  # closed with all others
        connection, memory = descriptors
        worker.main(socket.socket(fileno=connection), memory, message.rows, message.width)
    for one in descriptors:
        os.close(one)
    return pid


def _stand_in_for_sglang() -> None:
    """A class that was pickled by SGLang's client names its base there."""
    parts = SGLANG_NAME.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        sys.modules[name] = ModuleType(name)
    sys.modules[SGLANG_NAME].CustomLogitProcessor = CustomLogitProcessor  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(int(sys.argv[1]))
