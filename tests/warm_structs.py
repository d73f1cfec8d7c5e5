"""Shows whether msgspec has built its information on a Struct, which is what a crash of two threads depends on."""

from __future__ import annotations

import gc

import msgspec


def is_warm(kind: type[msgspec.Struct]) -> bool:
    return any(type(part).__name__ == "StructInfo" for part in gc.get_referents(kind))


def new_struct() -> type[msgspec.Struct]:
    """Return a Struct that passes for one of tureen and that nothing has decoded to."""
    return msgspec.defstruct("New", [("field", int)], module="tureen.new")
