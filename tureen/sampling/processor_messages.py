"""The messages between the engine and the workers of client processors. Replies have a fixed size."""

from __future__ import annotations

import struct

import msgspec

from tureen.sandbox.limits import WorkerLimits

LIMITS = WorkerLimits(memory_bytes=512 << 20, cpu_s=5, is_sealed=True)

REPLY = struct.Struct("<IBB200s")
"""Layout of a reply: number of the message answered, status (one of the three below), length of the text, text in
UTF-8."""

DONE, FAILED, REJECTED = 0, 1, 2
MAX_TEXT_BYTES = 200


class LogitsShape(msgspec.Struct, frozen=True, array_like=True):
    """The size of the float32 logits that a worker shares with the engine; the fork server is started with it."""

    rows: int
    width: int


class LoadCode(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Tells a worker, once and as message 0, to load what the client sent."""

    payload: str


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that a worker must know from now on."""

    number: int
    params: bytes  # JSON
    prompt_ids: list[int]
    output_ids: list[int]


class RunRows(msgspec.Struct, frozen=True, tag="run", array_like=True):
    """Tells a worker to process the first rows of the shared memory.

    rows: the sequence of each row, and its newest output tokens.
    """

    number: int  # of this message: 1, 2, …
    rows: list[tuple[int, list[int]]]
    new: list[NewSequence]
    dropped: list[int]  # sequences that have ended


ToWorker = LoadCode | RunRows


def reply(number: int, status: int, text: str = "") -> bytes:
    """Packs a worker's reply to message `number`; a longer text is cut."""
    encoded = text.encode(errors="replace")[:MAX_TEXT_BYTES]
    return REPLY.pack(number, status, len(encoded), encoded)
