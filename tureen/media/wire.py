"""What the front and the processes that decode say to each other. These are not trusted: the front checks all of it."""

from __future__ import annotations

import struct

import msgspec

SIZE = struct.Struct("<I")
"""Before a message: its length in bytes."""

BEGUN = b"b"
"""What a process says when it is locked in; from then on, its end is the fault of what it was sent."""

MAX_REPLY_BYTES = 256 << 20


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What the darkroom is started with, as JSON objects."""

    hf: bytes  # config.json
    preprocessor: bytes  # preprocessor_config.json


class Job(msgspec.Struct, frozen=True, array_like=True):
    """The pictures of one prompt. Their bytes come after it, one after the other."""

    modality: str
    sizes: tuple[int, ...]  # bytes that come
    are_base64: tuple[bool, ...]


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A Prepared."""

    pixels: bytes
    shape: tuple[int, int, int, int]
    num_tokens: int
    layout: tuple[int, ...]


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why there is nothing: what the client is answered."""

    message: str  # to be continued from the field's name
    index: int | None = None  # of the picture at fault
    is_ours: bool = False  # nothing that the client sent is to blame


class Reply(msgspec.Struct, frozen=True, array_like=True):
    items: tuple[Item, ...] = ()
    refusal: Refusal | None = None
