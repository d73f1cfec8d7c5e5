"""Knows the options of all dialects: the values that switch one off, and the fields that change an answer in some API,
so that no other API ignores them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tureen.registry import find_dialects

PARAMETER_PARTS = ("", "sampling_params", "parameters", "options")
"""The objects of a body that hold options: the body itself, and those for sampling parameters."""


class AbsentOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An option of other servers that no API of this server has."""

    why: str
    off: list[Any] = []  # values that switch it off


class NameList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of names of fields."""

    names: list[str]


class KnownOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file known_options.toml."""

    absent: dict[str, AbsentOption]
    beside: dict[str, str]  # option -> the absent option without which it has no effect
    off: dict[str, list[Any]]
    names: dict[str, str]  # another API's name of a sampling parameter -> its own
    others: NameList
    harmless: NameList


class ActingField(NamedTuple):
    """A field that changes the answer in some API."""

    routes: tuple[str, ...] = ()  # routes that honour it; () = no route of this server does
    off: tuple[Any, ...] = ()  # values that switch it off


@cache
def known_options() -> KnownOptions:
    """Returns the content of the file."""
    text = Path(__file__).with_name("known_options.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=KnownOptions)


def folded(name: str) -> str:
    """Returns a name in lower case and without underscores, for comparisons."""
    return name[:64].lower().replace("_", "").replace("-", "")


@cache
def names_elsewhere() -> frozenset[str]:
    """Returns the folded names of the fields that some API has, whether or not they act."""
    names = [name for _, part in _parts() for name in (*part.struct.__struct_fields__, *part.table.verdicts)]
    return frozenset(map(folded, (*names, *known_options().harmless.names)))


@cache
def acting_fields() -> dict[str, ActingField]:
    """Returns the fields that change the answer in some API, by their folded names: all fields that dialects honour or
    refuse, and those that only other servers have, except the harmless ones."""
    known = known_options()
    routes, defaults = defaultdict[str, list[str]](list), defaultdict[str, list[Any]](list)
    for name, route, default in _honoured():
        routes[folded(name)].append(route)
        defaults[folded(name)].append(default)
    off = {folded(name): values for name, values in known.off.items()}
    off |= {folded(name): option.off for name, option in known.absent.items()}
    for name, nothing in _refused():
        defaults[folded(name)].append(nothing)
    names = (*known.absent, *known.names, *known.others.names)
    harmless = {folded(name) for name in (*known.harmless.names, *known.beside)}
    return {
        name: ActingField(
            tuple(dict.fromkeys(routes.get(name, ()))), tuple(off.get(name, _common(defaults.get(name, []))))
        )
        for name in dict.fromkeys((*defaults, *map(folded, names)))
        if name not in harmless
    }


def _honoured() -> Iterator[tuple[str, str, Any]]:
    """Yields name, route and default of each option that a dialect honours."""
    for route, part in _parts():
        for field in msgspec.structs.fields(part.struct):
            if field.encode_name not in part.table.verdicts:
                yield field.encode_name, route, field.default


def _refused() -> Iterator[tuple[str, Any]]:
    """Yields each field that a dialect refuses, with the value that switches it off."""
    for _, part in _parts():
        for name, (nothing, _why) in part.table.refused.items():
            if "*" not in name and "[" not in name:
                yield name, nothing


def _parts() -> Iterator[tuple[str, Any]]:
    for module in find_dialects():
        for compat in module.DIALECT.compat:
            for part in compat.parts:
                if part.name in PARAMETER_PARTS and not compat.route.endswith("/count_tokens"):
                    yield f"{compat.api} {compat.route}", part


def _common(defaults: list[Any]) -> list[Any]:
    """Returns the default that all APIs have for a field; () if they differ, or if the default carries no meaning."""
    first = defaults[0] if defaults else None
    if first is None or first is msgspec.NODEFAULT:
        return []
    return [first] if all(is_same(first, other) for other in defaults) else []


def is_same(value: Any, other: Any) -> bool:
    """Returns whether two JSON values are the same: 1 and 1.0 are, 1 and true are not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def is_off(name: str, value: Any) -> bool:
    """Returns whether a value has no effect: it is empty, or it switches the option off."""
    field = acting_fields().get(folded(name))
    if field is None:
        return False
    is_empty = isinstance(value, str | list | dict) and not value
    return is_empty or any(is_same(value, off) for off in field.off)


def same_here(name: str, known: Collection[str]) -> str | None:
    """Returns the name in `known` that means the same sampling parameter as `name`; None = no name does."""
    names = {folded(other): parameter for other, parameter in known_options().names.items()}
    parameter = names.get(folded(name), name)
    return next((other for other in known if other != name and names.get(folded(other), other) == parameter), None)
