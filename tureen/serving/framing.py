"""Messages over a socket: a length of four bytes, then msgpack. An empty frame is a ping, or the answer to one."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("<I")
PING = HEADER.pack(0)


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def read_frame(connection: socket.socket) -> bytes | None:
    """The next payload; None when the other side is gone."""
    header = _read(connection, HEADER.size)
    return None if header is None else _read(connection, HEADER.unpack(header)[0])


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(size - len(data))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
