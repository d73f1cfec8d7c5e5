"""What pool, zygote and workers say to each other. Workers are hostile: what they send has a fixed size."""

from __future__ import annotations

import socket
import struct

import msgspec

HEADER = struct.Struct("<I")
REPLY = struct.Struct("<IBB200s")
"""Number of the message that is answered, status (one of the three below), length of the text, text in UTF-8."""

DONE, FAILED, REJECTED = 0, 1, 2
MAX_TEXT_BYTES = 200
CPU_STEP_S = 5
"""CPU time a worker may use at first, and what the pool adds as it makes calls."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn", array_like=True):
    """To the zygote, with two descriptors: a worker's socket, and its memory of rows * width float32."""

    rows: int
    width: int


class Kill(msgspec.Struct, frozen=True, tag="kill", array_like=True):
    """To the zygote: end this worker now."""

    pid: int


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """To a worker, once: what the client sent. It is message 0."""

    payload: str


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that a worker is to know from now on."""

    number: int
    params: bytes  # JSON: it has integers of any size
    prompt_ids: list[int]
    output_ids: list[int]


class Run(msgspec.Struct, frozen=True, tag="run", array_like=True):
    """To a worker: process the first rows of the memory. `rows`: of each the sequence, and its newest output tokens."""

    number: int  # of this message: 1, 2, …
    rows: list[tuple[int, list[int]]]
    new: list[Sequence]
    dropped: list[int]  # sequences that have ended


ToZygote = Spawn | Kill
ToWorker = Load | Run


def encode(message: ToZygote | ToWorker) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return HEADER.pack(len(payload)) + payload


def send(connection: socket.socket, message: ToZygote, descriptors: list[int] | None = None) -> None:
    """Raises OSError."""
    data = encode(message)
    if descriptors:
        sent = socket.send_fds(connection, [data], descriptors)
        data = data[sent:]
    connection.sendall(data)


def receive(connection: socket.socket, size: int) -> bytes | None:
    """Exactly so many bytes; None when the other side is gone."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def reply(number: int, status: int, text: str = "") -> bytes:
    encoded = text.encode(errors="replace")[:MAX_TEXT_BYTES]
    return REPLY.pack(number, status, len(encoded), encoded)
