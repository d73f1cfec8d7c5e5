"""What a declared type allows at a place inside it, for the errors of values that are not allowed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from msgspec import inspect

_type_info = cache(inspect.type_info)


def words_at(kind: Any, steps: Sequence[str]) -> list[str]:
    """The words that may stand there. `steps`: names of fields, and `[index]`."""
    found = [one for one in _at(kind, steps) if isinstance(one, inspect.LiteralType)]
    return [value for one in found for value in one.values if isinstance(value, str)]


def fields_at(kind: Any, steps: Sequence[str]) -> list[str]:
    """The names that fields of the object there have, that of what tells alternatives apart among them."""
    found = [one for one in _at(kind, steps) if isinstance(one, inspect.StructType)]
    tags = [one.tag_field for one in found if one.tag_field is not None]
    return [*dict.fromkeys(tags), *(field.encode_name for one in found for field in one.fields)]


def _at(kind: Any, steps: Sequence[str]) -> list[inspect.Type]:
    found = list(_plain(_type_info(kind)))
    for step in steps:
        found = [inner for one in found for inner in _inside(one, step)]
    return found


def _plain(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The alternatives of a type."""
    if isinstance(kind, inspect.Metadata):
        yield from _plain(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _plain(one)
    else:
        yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        if step == kind.tag_field:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == step:
                yield from _plain(field.type)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and step.startswith("["):
        yield from _plain(kind.item_type)
    elif isinstance(kind, inspect.DictType):
        yield from _plain(kind.value_type)
