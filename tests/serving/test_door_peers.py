"""The door of the engine's process, without a process: only fronts of its own user and of root come in."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from tureen.sandbox import framing
from tureen.serving.door import Door

STRANGER = 65534


class EndOfConnections(Exception):
    """The listener of a test has no more connections."""


class Connection(socket.socket):
    """An end of a socket pair. The kernel says that another user has the other end."""

    uid = STRANGER

    def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 1, self.uid, self.uid)


class Listener:
    """A listener that takes one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connections = [connection]

    def accept(self) -> tuple[socket.socket, str]:
        if not self._connections:
            raise EndOfConnections
        return self._connections.pop(), ""


@pytest.mark.parametrize(("uid", "is_let_in"), [(STRANGER, False), (os.geteuid(), True), (0, True)])
def test_the_door_lets_in_fronts_of_its_own_user_and_root_alone(uid, is_let_in):
    ours, theirs = socket.socketpair()
    connection = Connection(fileno=ours.detach())
    connection.uid = uid
    with theirs:
        with pytest.raises(EndOfConnections):
            Door("door", lambda _: None)._accept(Listener(connection))
        assert framing.receive(theirs, framing.ANY_SIZE) == (b"" if is_let_in else None)  # the engine's facts, of none
