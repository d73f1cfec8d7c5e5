"""Finds the schemas of a document that say the same: many tools write a schema out in each place where it is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tureen.grammar.schema.annotations import ANNOTATIONS
from tureen.grammar.schema.subschemas import NAMED_INSIDE, ONE_INSIDE, SEVERAL_INSIDE

SAYING_NOTHING = ANNOTATIONS - {"discriminator"}
"""Keywords that change nothing about which values are valid: annotations, and definitions, which references lead to."""

UNLIKE = frozenset(("uniqueItems", "contains", "minProperties", "maxProperties", "multipleOf", "not", "if"))
"""Keywords that a guard may enforce, and what may be read as one: it can be done in one place and not in another, so a
schema with one is like no other."""

SchemaObject: TypeAlias = dict[str, Any]


class EqualSchemas:
    """Groups schemas with the same keywords and values but for annotations, in the same resource, without UNLIKE ones.

    A schema's content has its subschemas' groups in it, not their contents: so all takes O(size of the document).
    """

    def __init__(self, schemas: Sequence[SchemaObject], resources: Mapping[int, object]) -> None:
        """`schemas`, which may grow: each before those inside it; `resources`: by `id` of the schema."""
        self._schemas = schemas
        self._resources = resources
        self._num_grouped = 0
        self._groups: dict[tuple[object, ...], list[SchemaObject]] = {}
        self._group_of: dict[int, list[SchemaObject]] = {}

    def all_like(self, schema: SchemaObject) -> Sequence[SchemaObject]:
        """Returns the schemas that say the same as one, with it, in an order that is always the same."""
        if len(self._schemas) > self._num_grouped:
            new = self._schemas[self._num_grouped :]
            self._num_grouped = len(self._schemas)
            for inner in reversed(new):
                group = self._groups.setdefault(self._content(inner), [])
                group.append(inner)
                self._group_of[id(inner)] = group
        return self._group_of.get(id(schema)) or (schema,)

    def _content(self, schema: SchemaObject) -> tuple[object, ...]:
        if not UNLIKE.isdisjoint(schema):
            return (id(schema),)
        content = [self._resources[id(schema)]]
        for keyword, value in schema.items():
            if keyword in SAYING_NOTHING:
                continue
            kind = type(value)
            content.append(keyword)
            if kind is str:
                content.append(value)
            elif kind is dict and keyword in ONE_INSIDE:
                content.append(self._told_apart(value))
            elif kind is dict and keyword in NAMED_INSIDE:
                content.append(tuple([(name, self._told_apart(item)) for name, item in value.items()]))
            elif kind is list and keyword in SEVERAL_INSIDE:
                content.append(tuple([self._told_apart(item) for item in value]))
            else:
                content.append((repr(value),))  # which tells 1 from 1.0, true and "1"
        return tuple(content)

    def _told_apart(self, value: Any) -> object:
        """Returns what is equal for schemas of one group only: of others than those known, for one object only."""
        return value if isinstance(value, bool) else id(self._group_of.get(id(value), value))
