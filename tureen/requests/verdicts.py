"""Reads a dialect's `fields.toml`: which fields of the original API are honoured with a difference, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec


class FieldRefusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of the original API that this server refuses."""

    why: str
    nothing: Any = None  # the value that asks for nothing, as null does


class WrittenTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of `fields.toml` as it is written."""

    told: dict[str, str] = {}  # field -> the difference
    refused: dict[str, str | FieldRefusal] = {}


class FieldTable(NamedTuple):
    """The verdicts on the fields of one object of a body. Fields that it does not name are honoured as in the original
    API."""

    told: Mapping[str, str] = MappingProxyType({})  # honoured, with a difference that /compat tells
    refused: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    """Field -> (the value that asks for nothing; why any other is refused)."""

    def joined(self, other: FieldTable) -> FieldTable:
        """Returns this table joined with another, whose verdicts win."""
        return FieldTable({**self.told, **other.told}, {**self.refused, **other.refused})


@cache
def read_tables(path: Path) -> dict[str, FieldTable]:
    """Reads the tables of a file, by the name of the body's object that each is about."""
    written = msgspec.toml.decode(path.read_text(encoding="utf-8"), type=dict[str, WrittenTable])
    return {name: FieldTable(table.told, _refused(table)) for name, table in written.items()}


def _refused(table: WrittenTable) -> dict[str, tuple[Any, str]]:
    refusals = {
        name: FieldRefusal(verdict) if isinstance(verdict, str) else verdict for name, verdict in table.refused.items()
    }
    return {name: (refusal.nothing, refusal.why) for name, refusal in refusals.items()}
