"""Every list and map that a body can hold, found in the declarations: where it stands, how many entries it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from tureen.app.openapi import all_field_types

Put = Callable[[Any], Any]
"""A body that is right but for the value it is given, which stands at some place."""


class Place(NamedTuple):
    """A list or a map of entries of one kind."""

    path: str
    most: int | None  # entries; None = it does not say
    is_map: bool
    entry: bytes  # JSON of one
    put: Put
    fit: int = sys.maxsize  # entries, before another limit is named

    @property
    def field(self) -> str:
        """What an error calls it, without the places of single entries."""
        return self.path.rpartition(".")[2].partition("[")[0]

    def filled(self, count: int) -> bytes:
        """A body in which it has so many entries."""
        return msgspec.json.encode(self.put(msgspec.Raw(_filled(self.is_map, self.entry, count))))


@lru_cache(maxsize=4)
def _filled(is_map: bool, entry: bytes, count: int) -> bytes:
    if not is_map:
        return b"[" + b",".join([entry] * count) + b"]"
    return b"{" + b",".join([b'"%d":%s' % (index, entry) for index in range(count)]) + b"}"


def places_of(struct: type[msgspec.Struct], put: Put, left_out: frozenset[str] = frozenset()) -> Iterator[Place]:
    """Of a body and of all that can stand in it, but for some fields of its own."""
    for field in msgspec.structs.fields(struct):
        if field.encode_name not in left_out:
            kind = _meant(struct, field.name) or inspect.type_info(field.type)
            yield from _places(kind, field.encode_name, lambda value, name=field.encode_name: put({name: value}))


def sample(kind: inspect.Type) -> Any:
    """A right value, as small as can be."""
    match kind:
        case inspect.Metadata():
            return sample(kind.type)
        case inspect.UnionType():
            return sample(kind.types[0])
        case inspect.StructType():
            made = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
            return made | {one.encode_name: sample(one.type) for one in kind.fields if one.required}
        case inspect.ListType() | inspect.VarTupleType():
            return [sample(kind.item_type)] * (kind.min_length or 0)
        case inspect.DictType():
            return {}
        case inspect.LiteralType():  # tools of other types are left out
            return "function" if "function" in kind.values else kind.values[0]
        case inspect.StrType():
            return "a"
        case inspect.IntType() | inspect.FloatType():
            return kind.ge or 1
        case _:
            return {inspect.BoolType: False, inspect.NoneType: None}.get(type(kind), 1)


def _meant(struct: type, name: str) -> inspect.Type | None:
    """Of a field whose entries are read later, by another declaration."""
    found = [kind for (owner, field), kind in all_field_types().items() if field == name and issubclass(struct, owner)]
    return inspect.type_info(found[0]) if found else None


def _places(
    kind: inspect.Type, path: str, put: Put, extra: dict[str, Any] | None = None, inside: tuple[type, ...] = ()
) -> Iterator[Place]:
    """`inside`: the objects around it; one that can stand in itself is looked at once."""
    match kind:
        case inspect.Metadata():
            yield from _places(kind.type, path, put, {**(extra or {}), **(kind.extra or {})}, inside)
        case inspect.UnionType():
            for one in kind.types:
                yield from _places(one, path, put, extra, inside)
        case inspect.ListType() | inspect.VarTupleType():
            for one in _alternatives(kind.item_type):
                is_number = isinstance(one, inspect.IntType | inspect.FloatType)
                most = kind.max_length if is_number else (extra or {}).get("batch", kind.max_length)
                fit = sys.maxsize if most == kind.max_length else kind.max_length or 0
                yield Place(path, most, False, msgspec.json.encode(sample(one)), put, fit)
                yield from _places(one, f"{path}[0]", lambda value: put([value]), inside=inside)
        case inspect.DictType():
            yield Place(path, kind.max_length, True, msgspec.json.encode(sample(kind.value_type)), put)
            yield from _places(kind.value_type, f"{path}.1", lambda value: put({"1": value}), inside=inside)
        case inspect.StructType() if kind.cls not in inside:
            rest, inside = sample(kind), (*inside, kind.cls)
            for one in kind.fields:
                inner = _meant(kind.cls, one.name) or one.type
                where = f"{path}.{one.encode_name}"
                yield from _places(
                    inner, where, lambda value, name=one.encode_name: put({**rest, name: value}), inside=inside
                )


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _alternatives(one)
    elif isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif not isinstance(kind, inspect.NoneType):
        yield kind
