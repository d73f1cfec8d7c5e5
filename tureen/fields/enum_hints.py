"""Looks up the values that a declared msgspec type allows at a path inside it, for error messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from msgspec import inspect

type_info = cache(inspect.type_info)


def words_at(kind: Any, steps: Sequence[str]) -> list[str]:
    """Returns the strings that literal types allow at the path `steps`, whose steps are field names and `[index]`."""
    literals = [literal for literal in _at(kind, steps) if isinstance(literal, inspect.LiteralType)]
    return [value for literal in literals for value in literal.values if isinstance(value, str)]


def _at(kind: Any, steps: Sequence[str]) -> list[inspect.Type]:
    """Returns the types that `steps` lead to from `kind`."""
    types = list(members(type_info(kind)))
    for step in steps:
        types = [inner for type_info in types for inner in _inside(type_info, step)]
    return types


def members(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yields the members of a union, or the type itself, without constraints (`Meta`)."""
    if isinstance(kind, inspect.Metadata):
        yield from members(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for alternative in kind.types:
            yield from members(alternative)
    else:
        yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yields the types that one step, a field name or `[index]`, leads to."""
    if isinstance(kind, inspect.StructType):
        if step == kind.tag_field:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == step:
                yield from members(field.type)
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and step.startswith("["):
        yield from members(kind.item_type)
    elif isinstance(kind, inspect.DictType):
        yield from members(kind.value_type)
