"""The messages between the engine and the workers of client processors. Their replies have a fixed size."""

from __future__ import annotations

import struct

import msgspec

from tureen.sandbox.limits import WorkerLimits

LIMITS = WorkerLimits(memory_bytes=512 << 20, cpu_s=5, is_sealed=True)

REPLY = struct.Struct("<IBB200s")
"""Number of the message that is answered, status (one of the three below), length of the text, text in UTF-8."""

DONE, FAILED, REJECTED = 0, 1, 2
MAX_TEXT_BYTES = 200


class LogitsShape(msgspec.Struct, frozen=True, array_like=True):
    """The size of the logits that a worker shares with the engine, float32; the fork server is started with it."""

    rows: int
    width: int


class LoadCode(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """To a worker, once: what the client sent. It is message 0."""

    payload: str


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that a worker is to know from now on."""

    number: int
    params: bytes  # JSON: it has integers of any size
    prompt_ids: list[int]
    output_ids: list[int]


class RunRows(msgspec.Struct, frozen=True, tag="run", array_like=True):
    """To a worker: process the first rows of the memory. `rows`: of each the sequence, and its newest output tokens."""

    number: int  # of this message: 1, 2, …
    rows: list[tuple[int, list[int]]]
    new: list[NewSequence]
    dropped: list[int]  # sequences that have ended


ToWorker = LoadCode | RunRows


def reply(number: int, status: int, text: str = "") -> bytes:
    encoded = text.encode(errors="replace")[:MAX_TEXT_BYTES]
    return REPLY.pack(number, status, len(encoded), encoded)
