"""Turns JSON values into the bytes that are stored, and back. A checksum tells damage apart from what was written."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import msgspec

from tureen.storage.database import Damaged

LEVEL = 1
"""The fastest level of zlib; text becomes about a third."""

_encode = msgspec.json.Encoder().encode


class Packed(NamedTuple):
    """A value as it is stored: compressed, of which zlib keeps a checksum."""

    blob: bytes
    num_bytes: int  # before it was compressed


def pack(value: Any) -> Packed:
    """Returns a JSON value as it is stored."""
    return pack_bytes(_encode(value))


def unpack(packed: bytes) -> Any:
    """Returns the value that `pack` was given. Raises Damaged."""
    try:
        return msgspec.json.decode(unpack_bytes(packed))
    except msgspec.DecodeError as error:
        raise Damaged(str(error)) from None


def pack_bytes(plain: bytes) -> Packed:
    """Returns bytes as they are stored."""
    return Packed(zlib.compress(plain, LEVEL), len(plain))


def unpack_bytes(packed: bytes) -> bytes:
    """Returns the bytes that `pack_bytes` was given. Raises Damaged."""
    try:
        return zlib.decompress(packed)
    except (zlib.error, TypeError) as error:
        raise Damaged(str(error)) from None
