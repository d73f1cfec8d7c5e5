"""Ports for what has to know its port before it listens, or to listen there again."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

SYSTEMS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody has. It is below those that the system gives to connections, or the next connection of
    whoever else runs here might take it."""
    first = int(SYSTEMS_RANGE.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
