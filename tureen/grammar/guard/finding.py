"""The keywords of a schema that a guard enforces, found at the values that they are surely about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from math import floor
from typing import Any, NamedTuple

import msgspec

from tureen.grammar.expression import SchemaError
from tureen.grammar.guard.facts import NOWHERE, GuardFacts, GuardNode
from tureen.grammar.schema.document import Document

MAX_NODES = 2_000
MAX_KEYS = 1_000
"""The largest number of keys that is waited for."""
ARRAY, OBJECT, NUMBER = "array", "object", "number"
GUARDED = ("uniqueItems", "minProperties", "multipleOf")
KINDS = (ARRAY, OBJECT, NUMBER)
CONDITIONAL = ("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
CONDITIONAL_MAPS = ("patternProperties", "dependentSchemas", "dependencies")

Schemas = tuple[Mapping[str, Any], ...]
Noted = frozenset[tuple[str, int]]
"""The keywords that the grammar leaves out, each with the id of its schema."""


class Guarding(NamedTuple):
    """The facts of a schema that a guard enforces, and the keywords that it enforces wholly."""

    facts: GuardFacts | None  # None: nothing
    enforced: frozenset[tuple[str, str]]  # keywords, and where their schemas stand, that are enforced everywhere


def guarding(document: Document, unenforced: Iterable[tuple[str, str]]) -> Guarding:
    """Returns what can be guarded of the keywords that the grammar leaves out, each given with its schema's pointer."""
    places = {(keyword, pointer): _at(document.root, pointer) for keyword, pointer in unenforced}
    noted = {key: (key[0], id(part)) for key, part in places.items() if isinstance(part, dict) and key[0] in GUARDED}
    finder = _FactFinder(document, frozenset(noted.values()))
    if not noted or not finder.find():
        return Guarding(None, frozenset())
    nodes = _pruned(finder.nodes)
    sure = frozenset(key for key, fact in noted.items() if fact in finder.kept and fact[1] not in finder.unsure)
    return Guarding(GuardFacts(nodes) if nodes else None, sure)


def _at(schema: Any, pointer: str) -> Any:
    """Returns the part of a schema that a pointer such as `#/properties/a` names; None where there is none."""
    if pointer in ("", "#"):
        return schema
    if not pointer.startswith("#/"):
        return None
    part = schema
    for step in pointer[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isascii() and key.isdigit() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _pruned(nodes: list[GuardNode]) -> tuple[GuardNode, ...]:
    """Returns the nodes where those that lead to nothing guarded are NOWHERE; none at all where the first is such."""
    useful = {index for index, node in enumerate(nodes) if node.says_something}
    size = -1
    while size != len(useful):
        size = len(useful)
        useful |= {index for index, node in enumerate(nodes) if useful.intersection(node.inner)}

    def kept(index: int) -> int:
        return index if index in useful else NOWHERE

    if 0 not in useful:
        return ()
    return tuple(
        msgspec.structs.replace(
            node,
            first_items=tuple(map(kept, node.first_items)),
            items=kept(node.items),
            keys={key: kept(index) for key, index in node.keys.items()},
            others=kept(node.others),
        )
        for node in nodes
    )


class _FactFinder:
    """Follows a schema from its root to the values that its parts are about."""

    def __init__(self, document: Document, noted: Noted) -> None:
        self._document = document
        self._noted = noted
        self.nodes: list[GuardNode] = []
        self.kept: set[tuple[str, int]] = set()  # facts that stand on a node
        self.unsure: set[int] = set()  # schemas that are about a value under conditions, or about one nobody knows
        self._numbers: dict[frozenset[int], int] = {}
        self._waiting: list[Schemas] = []

    def find(self) -> bool:
        """Makes the nodes. False where there would be too many."""
        self._number((self._document.root,))
        while self._waiting:
            if len(self._numbers) > MAX_NODES:
                return False
            self.nodes.append(self._node(self._waiting.pop(0)))
        return True

    def _number(self, schemas: Iterable[Any]) -> int:
        """Returns the node of the values that these schemas are about."""
        known = tuple({id(schema): schema for schema in schemas if isinstance(schema, dict)}.values())
        if not known:
            return NOWHERE
        key = frozenset(map(id, known))
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._waiting.append(known)
        return self._numbers[key]

    def _node(self, schemas: Schemas) -> GuardNode:
        arrays, objects, numbers = (tuple(self._applied(schemas, kind)) for kind in KINDS)
        num_first = max((len(_first_items(schema)) for schema in arrays), default=0)
        names = dict.fromkeys(key for schema in objects for key in _map(schema, "properties"))
        step, bounds = self._step(numbers)
        return GuardNode(
            is_unique=self._is_unique(arrays),
            least_keys=self._least_keys(objects),
            step=step,
            bounds=bounds,
            first_items=tuple(self._number(_item(schema, index) for schema in arrays) for index in range(num_first)),
            items=self._number(_item(schema, num_first) for schema in arrays),
            keys={key: self._number(_member(schema, key) for schema in objects) for key in names},
            others=self._number(_member(schema, None) for schema in objects),
        )

    def _is_unique(self, schemas: Schemas) -> bool:
        return bool([schema for schema in schemas if self._keeps(schema, "uniqueItems")])

    def _least_keys(self, schemas: Schemas) -> int:
        few = [schema for schema in schemas if schema.get("minProperties", MAX_KEYS + 1) <= MAX_KEYS]
        return max([int(schema["minProperties"]) for schema in few if self._keeps(schema, "minProperties")], default=0)

    def _keeps(self, schema: Mapping[str, Any], keyword: str) -> bool:
        fact = (keyword, id(schema))
        if fact in self._noted:
            self.kept.add(fact)
        return fact in self._noted

    def _step(self, schemas: Schemas) -> tuple[tuple[int, int] | None, tuple[str | None, str | None]]:
        steps = [Fraction(str(schema["multipleOf"])) for schema in schemas if self._keeps(schema, "multipleOf")]
        if len(steps) != 1:
            self.kept -= {("multipleOf", id(schema)) for schema in schemas}
            return None, (None, None)
        [step] = steps
        types = [schema["type"] for schema in schemas if "type" in schema]
        if any(kind == "integer" or ("integer" in kind and NUMBER not in kind) for kind in types):
            step = Fraction(step.numerator)
        exact = Decimal(step.numerator) / Decimal(step.denominator)
        scale = max(0, -int(exact.normalize().as_tuple().exponent))
        low = [*_bounds(schemas, "minimum"), *(_over(bound, scale) for bound in _bounds(schemas, "exclusiveMinimum"))]
        high = [
            *_bounds(schemas, "maximum"),
            *(-_over(-bound, scale) for bound in _bounds(schemas, "exclusiveMaximum")),
        ]
        bounds = (str(max(low)) if low else None, str(min(high)) if high else None)
        return (int(step * 10**scale), scale), bounds

    def _applied(self, schemas: Schemas, kind: str) -> Iterator[Mapping[str, Any]]:
        """Yields the schemas that a value of this kind must match if it matches these."""
        seen: set[int] = set()
        waiting: list[Any] = list(schemas)
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            waiting += self._same_value(schema, kind)
            for keyword in (*CONDITIONAL, *(["additionalProperties"] if "patternProperties" in schema else [])):
                self._doubt(schema.get(keyword))
            for keyword in CONDITIONAL_MAPS:
                for part in _map(schema, keyword).values():
                    self._doubt(part)

    def _same_value(self, schema: Mapping[str, Any], kind: str) -> Iterator[Any]:
        target = self._target(schema)
        if target is not None:
            yield target
        self._doubt(self._target(schema, "$dynamicRef"))
        yield from _list(schema, "allOf")
        for keyword in ("anyOf", "oneOf"):
            able = [part for part in _list(schema, keyword) if self._admits(part, kind, set())]
            if len(able) == 1:
                yield able[0]
            else:
                for part in able:
                    self._doubt(part)

    def _target(self, schema: Any, keyword: str = "$ref") -> Any:
        """Returns the schema that a reference leads to; None where there is none, or where what looks like a schema
        is a value: in an `enum`, an example, an annotation."""
        with suppress(SchemaError, KeyError, AttributeError, TypeError):
            return self._document.resolve(schema[keyword], schema)[0] if keyword in schema else None
        return None

    def _admits(self, schema: Any, kind: str, seen: set[int]) -> bool:
        """Returns whether a value of this kind may match; True where that is not seen at once."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return schema is not False
        seen.add(id(schema))
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if kind not in types and not (kind == NUMBER and "integer" in types):
                return False
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
        )
        if values is not None and not any(_kind(value) == kind for value in values):
            return False
        return all(self._admits(part, kind, seen) for part in (*_list(schema, "allOf"), self._target(schema)))

    def _doubt(self, schema: Any) -> None:
        """Notes that all in a schema is enforced nowhere, or only sometimes."""
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if isinstance(part, list):
                waiting += part
            elif isinstance(part, dict) and id(part) not in self.unsure:
                self.unsure.add(id(part))
                waiting += part.values()
                waiting += [self._target(part), self._target(part, "$dynamicRef")]


def _kind(value: Any) -> str:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return NUMBER
    return OBJECT if isinstance(value, dict) else ARRAY if isinstance(value, list) else ""


def _bounds(schemas: Schemas, keyword: str) -> list[Fraction]:
    return [Fraction(str(schema[keyword])) for schema in schemas if _kind(schema.get(keyword)) == NUMBER]


def _over(bound: Fraction, scale: int) -> Fraction:
    """Returns the next number above the bound that has so many decimals."""
    return Fraction(floor(bound * 10**scale) + 1, 10**scale)


def _map(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    return _list(schema, "prefixItems") or _list(schema, "items")


def _item(schema: Mapping[str, Any], index: int) -> Any:
    """Returns the schema of the item at a place."""
    first = _first_items(schema)
    if index < len(first):
        return first[index]
    return schema.get("additionalItems" if isinstance(schema.get("items"), list) else "items")


def _member(schema: Mapping[str, Any], key: str | None) -> Any:
    """Returns the schema of the value of a key; None is any that is not named."""
    named = _map(schema, "properties")
    if key is not None and key in named:
        return named[key]
    return None if "patternProperties" in schema else schema.get("additionalProperties")
