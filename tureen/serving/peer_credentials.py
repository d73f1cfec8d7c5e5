"""Tells which user is at the other end of a connection from this machine.

Sources: unix(7), SO_PEERCRED; proc_pid_net(5), /proc/net/tcp.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final, Protocol

from tureen.files import read_text

ESTABLISHED: Final = "01"
TABLES: Final = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}


class SocketFacts(Protocol):
    """A connected socket."""

    @property
    def family(self) -> int: ...

    def getsockname(self) -> tuple[str, int]: ...

    def getpeername(self) -> tuple[str, int]: ...

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def is_trusted(connection: SocketFacts) -> bool:
    """Return whether the peer's user is this process's own, or root."""
    return uid_of_peer(connection) in (os.geteuid(), 0)


def uid_of_peer(connection: SocketFacts) -> int | None:
    """Return the user id of the process that has opened the other end: of a Unix socket, or of a TCP connection within
    this machine. None if that is not known."""
    if connection.family == socket.AF_UNIX:
        if not hasattr(socket, "SO_PEERCRED"):  # not Linux; the folders of our sockets are this user's alone
            return os.geteuid()
        size = struct.calcsize("3i")
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(uid)
    ends = [_as_in_table(connection.family, *name[:2]) for name in (connection.getpeername(), connection.getsockname())]
    try:
        lines = read_text(TABLES[socket.AddressFamily(connection.family)]).splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return None
    return next((uid for uid in (_uid(line.split(), ends) for line in lines) if uid is not None), None)


def _uid(fields: list[str], ends: list[str]) -> int | None:
    """Return the owner of a table's line, if that is an open socket between `ends`. A closed one is listed as root's,
    with inode 0."""
    is_it = fields[1:3] == ends and fields[3] == ESTABLISHED and fields[9] != "0"
    return int(fields[7]) if is_it else None


def _as_in_table(family: int, host: str, port: int) -> str:
    raw = socket.inet_pton(family, host)
    words = (int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
