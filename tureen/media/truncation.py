"""Finds out whether a picture's file is complete. Pillow shows what it can of a PNG or a GIF whose end is missing."""

from __future__ import annotations

import zlib

PNG_CHUNKS = 8  # where they begin, behind the signature
GIF_BLOCKS = 13
EXTENSION, FRAME, TRAILER = b"!,;"


def is_whole(kind: str, data: bytes) -> bool:
    """Says whether the file goes to its proper end; what stands behind that does not matter.

    JPEG and WEBP are left to Pillow, which misses every byte of theirs.
    """
    try:
        return {"PNG": _is_whole_png, "GIF": _is_whole_gif}.get(kind, bool)(data)
    except IndexError:
        return False


def _is_whole_png(data: bytes) -> bool:
    """Says whether a PNG goes to the chunk IEND, each chunk as its checksum says (PNG specification, 5.3)."""
    view, at = memoryview(data), PNG_CHUNKS
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(view[at : at + 4])
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4]):
            return False
        if data[at + 4 : at + 8] == b"IEND":
            return True
        at = end + 4
    return False


def _is_whole_gif(data: bytes) -> bool:
    """Says whether a GIF goes to its trailer (GIF89a specification, appendix B). Bytes between blocks that begin none
    are passed over."""
    at = GIF_BLOCKS + _table_size(data[GIF_BLOCKS - 3])
    while data[at] != TRAILER:
        if data[at] == EXTENSION:
            at = _behind_pieces(data, at + 2)
        elif data[at] == FRAME:
            at = _behind_pieces(data, at + 11 + _table_size(data[at + 9]))
        else:
            at += 1
    return True


def _behind_pieces(data: bytes, at: int) -> int:
    """Returns the position behind the pieces of which an extension or a frame consists."""
    while data[at]:
        at += 1 + data[at]
    return at + 1


def _table_size(packed: int) -> int:
    """Returns the bytes of the colour table that these flags announce."""
    return 3 << (packed & 7) + 1 if packed & 0x80 else 0
