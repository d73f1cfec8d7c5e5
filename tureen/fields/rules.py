"""Reads a dialect's `fields.toml`: which fields of the original API are honoured with a
difference, accepted without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from tureen.errors import InvalidRequest
from tureen.fields import ignored
from tureen.fields.known_options import is_off, is_same, known_options

T = TypeVar("T")


class FieldRefusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of the original API that this server refuses."""

    why: str
    nothing: Any = None  # the value without effect, as null


class FieldWithoutEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of the original API that is accepted, has no effect, and is reported as ignored."""

    why: str
    nothing: Any = None  # the value that is not reported, as null


class WrittenTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of `fields.toml` as it is written."""

    unknown: Literal["refused", "told"] = "refused"
    differs: dict[str, str] = {}  # field -> the difference
    told: dict[str, str | FieldWithoutEffect] = {}  # field -> why it has no effect
    refused: dict[str, str | FieldRefusal] = {}
    shared: list[str] = []  # fields of the original API whose verdicts are in known_options.toml


class FieldTable(NamedTuple):
    """The verdicts on the fields of one object of a body. Fields that it does not name are honoured as in the original
    API."""

    differs: Mapping[str, str] = MappingProxyType({})  # honoured, with a difference that /compat shows
    told: Mapping[str, FieldWithoutEffect] = MappingProxyType({})
    """Field -> why it has no effect. A field of an inner object is written `tools[].strict`."""
    refused: Mapping[str, tuple[Any, str]] = MappingProxyType({})
    """Field -> (the value without effect; why any other is refused)."""
    tells_unknown: bool = False  # unknown fields are accepted and reported; else they are refused

    def joined(self, other: FieldTable) -> FieldTable:
        """Returns this table joined with another, whose verdicts take precedence."""
        replaced = {*other.differs, *other.told, *other.refused}
        return FieldTable(
            {**_without(self.differs, replaced), **other.differs},
            {**_without(self.told, replaced), **other.told},
            {**_without(self.refused, replaced), **other.refused},
            self.tells_unknown or other.tells_unknown,
        )

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The fields that are reported or refused."""
        return (*self.told, *self.refused)

    def settle(self, name: str, value: Any, path: str) -> None:
        """Reports or refuses a field by its verdict, unless its value has no effect. `path`: the field in the request.
        Raises InvalidRequest with the reason."""
        told = self.told.get(name)
        nothing, why = self.refused[name] if told is None else (told.nothing, told.why)
        if value is None or is_same(value, nothing) or is_off(name, value):
            return
        if told is None:
            raise InvalidRequest(f"{path} is not available: {why}", field=path, code="not_available")
        ignored.tell(path, why)


TELLS_UNKNOWN = FieldTable(tells_unknown=True)


@cache
def read_tables(path: Path) -> dict[str, FieldTable]:
    """Reads the tables of a file, by the name of the body's object that each is about."""
    written = msgspec.toml.decode(path.read_text(encoding="utf-8"), type=dict[str, WrittenTable])
    return {
        name: FieldTable(table.differs, _told(table), _refused(table), table.unknown == "told")
        for name, table in written.items()
    }


def _without(verdicts: Mapping[str, T], names: set[str]) -> dict[str, T]:
    return {name: verdict for name, verdict in verdicts.items() if name not in names}


def _told(table: WrittenTable) -> dict[str, FieldWithoutEffect]:
    known = known_options()
    beside = {
        name: FieldWithoutEffect(beside_reason(known.beside[name])) for name in table.shared if name in known.beside
    }
    written = {
        name: FieldWithoutEffect(verdict) if isinstance(verdict, str) else verdict
        for name, verdict in table.told.items()
    }
    return beside | written


def beside_reason(absent: str) -> str:
    """Returns why an option has no effect that acts only together with the `absent` one."""
    return f"it acts only with {absent}, which is not supported"


def _refused(table: WrittenTable) -> dict[str, tuple[Any, str]]:
    known = known_options()
    absent = {name: known.absent[name] for name in table.shared if name not in known.beside}
    written = {
        name: FieldRefusal(verdict) if isinstance(verdict, str) else verdict for name, verdict in table.refused.items()
    }
    return {name: (next(iter(option.off), None), option.why) for name, option in absent.items()} | {
        name: (refusal.nothing, refusal.why) for name, refusal in written.items()
    }
