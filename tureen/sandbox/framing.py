"""Messages between processes over a socket: a length in four bytes, then the bytes.

A worker may be hostile, so whoever reads from one bounds size and time.
"""

from __future__ import annotations

import math
import socket
import struct
import time

HEADER = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 << 20
ANY_SIZE = (1 << 32) - 1
"""A limit that allows every message: no length of four bytes exceeds it."""

PIECE_BYTES = 1 << 20


class Oversized(OSError):
    """The other side announces a message larger than it may send."""


def framed(payload: bytes) -> bytes:
    """Returns the bytes of one message, for whoever writes them otherwise than with `send`."""
    return HEADER.pack(len(payload)) + payload


def is_whole(arrived: bytes) -> bool:
    """Returns whether these bytes begin with a whole message."""
    return len(arrived) >= HEADER.size and len(arrived) - HEADER.size >= HEADER.unpack_from(arrived)[0]


def send(connection: socket.socket, *parts: bytes, until_s: float | None = None) -> None:
    """Writes one message, made of these parts. Raises OSError; TimeoutError past `until_s` of the monotonic clock."""
    is_small = len(parts) == 1 and len(parts[0]) < PIECE_BYTES
    for part in (framed(parts[0]),) if is_small else (HEADER.pack(sum(map(len, parts))), *parts):
        _limit(connection, until_s)
        connection.sendall(part)


def receive(
    connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES, *, until_s: float | None = None
) -> bytes | None:
    """Reads the next message; returns None when the other side is gone.

    Raises OSError; TimeoutError past `until_s` of the monotonic clock, Oversized before any of the message is read.
    """
    header = _receive_exactly(connection, HEADER.size, until_s)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > max_bytes:
        raise Oversized(f"a message of {size} bytes; at most {max_bytes} are taken")
    return _receive_exactly(connection, size, until_s)


def _receive_exactly(connection: socket.socket, size: int, until_s: float | None) -> bytes | None:
    pieces: list[bytes] = []
    while size:
        _limit(connection, until_s)
        piece = connection.recv(min(size, PIECE_BYTES))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _limit(connection: socket.socket, until_s: float | None) -> None:
    if until_s is not None:  # a sealed worker, which waits for ever, may not change its socket
        connection.settimeout(None if until_s == math.inf else max(0.001, until_s - time.monotonic()))
