"""What becomes of the fields of APIs that were somebody else's first: the tables in a dialect's `fields.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec


class FieldRefusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field that this server does not have."""

    why: str
    nothing: Any = None  # the value that asks for nothing, as null does


class WrittenTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table as it stands in a file."""

    told: dict[str, str] = {}
    refused: dict[str, str | FieldRefusal] = {}


class FieldTable(NamedTuple):
    """The verdicts on fields of one object of a body. Those that it does not name are honoured as in the original."""

    told: Mapping[str, str] = MappingProxyType({})  # honoured, with a difference that /compat tells
    refused: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    """The value that asks for nothing, and why any other is refused."""

    def joined(self, other: FieldTable) -> FieldTable:
        """With another table, which wins."""
        return FieldTable({**self.told, **other.told}, {**self.refused, **other.refused})


@cache
def read_tables(path: Path) -> dict[str, FieldTable]:
    """The tables of a file by the object of the body that they are about."""
    written = msgspec.toml.decode(path.read_text(encoding="utf-8"), type=dict[str, WrittenTable])
    return {name: FieldTable(table.told, _refused(table)) for name, table in written.items()}


def _refused(table: WrittenTable) -> dict[str, tuple[Any, str]]:
    found = {name: FieldRefusal(given) if isinstance(given, str) else given for name, given in table.refused.items()}
    return {name: (refusal.nothing, refusal.why) for name, refusal in found.items()}
