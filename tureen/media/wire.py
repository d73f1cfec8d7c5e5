"""The messages between the front and the workers that decode. Workers are not trusted: the front checks all of a
reply."""

from __future__ import annotations

import struct

import msgspec

from tureen.sandbox.limits import WorkerLimits

LIMITS = WorkerLimits(memory_bytes=1536 << 20, cpu_s=15, is_sealed=True, alarm_s=60.0)
"""The limits of a worker, for all pictures of a prompt. After 60 s it is ended even where it does not compute."""

SIZE = struct.Struct("<I")
"""Layout of the number before a message to a worker: the length of its DecodeJob. The pictures' bytes follow the
job."""

MAX_REPLY_BYTES = 255 << 20
"""Most bytes of pixels in a reply. Messages may have 256 MiB."""


class DecoderSetup(msgspec.Struct, frozen=True, array_like=True):
    """The settings that the fork server is started with, as JSON objects."""

    hf: bytes  # config.json
    preprocessor: bytes  # preprocessor_config.json
    max_pixels: int | None = None  # pictures with more are reduced to at most this number


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """The pictures of one prompt. Their bytes come after it."""

    modality: str
    sizes: tuple[int, ...]  # bytes that come
    are_base64: tuple[bool, ...]


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A Prepared, as it is sent."""

    pixels: bytes
    shape: tuple[int, int, int, int]
    num_tokens: int
    layout: tuple[int, ...]


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """The reason why there is no picture; the client gets it as the answer."""

    message: str  # to be continued from the field's name
    index: int | None = None  # of the picture at fault
    is_ours: bool = False  # nothing that the client sent is to blame


class DecodeReply(msgspec.Struct, frozen=True, array_like=True):
    """The prepared pictures, or the refusal."""

    items: tuple[Item, ...] = ()
    refusal: Refusal | None = None
