"""The keywords by which a schema itself limits values: types, exact values, numbers, strings, arrays and objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from decimal import Decimal
from typing import Any

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema import arrays
from tureen.grammar.schema.algebra import Algebra
from tureen.grammar.schema.document import Document, Schema, Scope
from tureen.grammar.schema.formats import format_strings
from tureen.grammar.schema.keywords import COMBINATORS, KEYWORDS, count
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.shapes import (
    FALSE,
    NULL,
    STRINGS,
    TRUE,
    ArrayShape,
    ItemCount,
    ObjectShape,
    Property,
    PropertySet,
    ValueSet,
    ValueShape,
)
from tureen.grammar.schema.strings import StringSet

OWN_KEYWORDS = frozenset(keyword for known in KEYWORDS.values() for keyword in known if keyword not in COMBINATORS)
ARRAY_KEYWORDS = frozenset(
    ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "contains", "uniqueItems")
)
OBJECT_KEYWORDS = frozenset((
    "properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties",
    "maxProperties",
))  # fmt: skip
OPEN_KEYWORDS = frozenset(("additionalProperties", "patternProperties", "propertyNames"))
NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))

ReadNode = Callable[[Schema, Scope], ValueSet]


class Own:
    """Reads schemas of one document without their combinators and references."""

    def __init__(self, document: Document, algebra: Algebra, node: ReadNode) -> None:
        self._document = document
        self._algebra = algebra
        self._node = node
        self._values: dict[Hashable, ValueSet] = {}

    def read(self, schema: dict[str, Any], scope: Scope) -> ValueShape:
        """Raises GrammarError."""
        names = schema.get("type")
        types = {names} if isinstance(names, str) else None if names is None else set(names)
        shape = self._typed(schema, scope, types)
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = schema["enum"] if keyword == "enum" else [schema["const"]]
                shape = self._algebra.meet(shape, self._exactly(values))
        return shape

    def _typed(self, schema: dict[str, Any], scope: Scope, types: set[str] | None) -> ValueShape:
        empty = self._algebra.no_shape
        plain = (NULL if types is None or "null" in types else 0) | (
            TRUE | FALSE if types is None or "boolean" in types else 0
        )
        has_numbers = types is None or not types.isdisjoint(("number", "integer"))
        return ValueShape(
            plain,
            self._numbers(schema, types) if has_numbers else empty.numbers,
            self._strings(schema) if types is None or "string" in types else empty.strings,
            self._arrays(schema, scope) if types is None or "array" in types else (),
            self._objects(schema, scope) if types is None or "object" in types else (),
            STRINGS if "format" in schema and (types is None or "string" in types) else 0,
        )

    def _numbers(self, schema: dict[str, Any], types: set[str] | None) -> NumberSet:
        is_integer = types is not None and "number" not in types
        numbers = NumberSet.integers() if is_integer else NumberSet.anything()
        if not NUMBER_KEYWORDS.isdisjoint(schema):
            bounds = NumberSet.between(
                schema.get("minimum"),
                schema.get("maximum"),
                above=schema.get("exclusiveMinimum"),
                below=schema.get("exclusiveMaximum"),
            )
            numbers = numbers.intersect(bounds)
            if "multipleOf" in schema:
                numbers = numbers.intersect(NumberSet.multiples_of(schema["multipleOf"]))
        return numbers

    def _strings(self, schema: dict[str, Any]) -> StringSet:
        strings = StringSet.anything()
        least, most = count(schema, "minLength") or 0, count(schema, "maxLength")
        if least or most is not None:
            strings = StringSet.of_length(least, most)
        if "pattern" in schema:
            strings = strings.intersect(StringSet.pattern(schema["pattern"]))
        if "format" in schema:
            strings = strings.intersect(format_strings(schema["format"]))
        return strings

    def _arrays(self, schema: dict[str, Any], scope: Scope) -> tuple[ArrayShape, ...]:
        if ARRAY_KEYWORDS.isdisjoint(schema):
            return (self._algebra.any_array,)
        items: Any = schema.get("items", True)
        first: Any = schema.get("prefixItems", ())
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        item_counts = []
        if "contains" in schema:
            least = count(schema, "minContains")
            node = self._node(schema["contains"], scope)
            item_counts.append(ItemCount(0, node, 1 if least is None else least, count(schema, "maxContains")))
        shape = ArrayShape(
            tuple(self._node(item, scope) for item in first),
            self._node(items, scope),
            count(schema, "minItems") or 0,
            count(schema, "maxItems"),
            tuple(item_counts),
            schema.get("uniqueItems", False),
        )
        tidied = arrays.tidy(self._algebra, shape)
        return () if tidied is None else (tidied,)

    def _objects(self, schema: dict[str, Any], scope: Scope) -> tuple[ObjectShape, ...]:
        if OBJECT_KEYWORDS.isdisjoint(schema):
            return (self._algebra.any_object,)
        sets = self._algebra.keys
        others = self._node(schema.get("additionalProperties", True), scope)
        patterns = [
            (sets.pattern(pattern), self._node(value, scope))
            for pattern, value in schema.get("patternProperties", {}).items()
        ]
        classes: list[tuple[StringSet, tuple[ValueSet, ...]]] = [(sets.every, ())]
        for names, node in patterns:
            parts = sets.split(classes, names)
            classes = [(part, (*nodes, node) if is_inside else nodes) for part, nodes, is_inside in parts]
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        named = {}
        for key in dict.fromkeys((*properties, *required)):
            nodes = [self._node(properties[key], scope)] if key in properties else []
            nodes += [node for names, node in patterns if names.contains(key)]
            named[key] = self._algebra.all_of(nodes) if nodes else others
        free = [PropertySet(names, self._algebra.all_of(nodes) if nodes else others) for names, nodes in classes]
        if "propertyNames" in schema:
            names = self._names(schema, scope)
            free = [
                PropertySet(part, node if is_inside else self._algebra.nothing)
                for part, node, is_inside in sets.split(free, names)
            ]
            named = {key: node if names.contains(key) else self._algebra.nothing for key, node in named.items()}
        is_required = set(required)
        return (
            ObjectShape(
                {key: Property(key in is_required, node) for key, node in named.items()},
                tuple(free),
                count(schema, "minProperties") or 0,
                count(schema, "maxProperties"),
                is_open=not OPEN_KEYWORDS.isdisjoint(schema),
            ),
        )

    def _names(self, schema: dict[str, Any], scope: Scope) -> StringSet:
        """The keys that propertyNames allows."""
        shape = self._algebra.shape(self._node(schema["propertyNames"], scope))
        if shape.partial & STRINGS:
            raise GrammarError('"format" in "propertyNames" cannot be enforced: use "pattern" there')
        return shape.strings

    def _exactly(self, values: list[Any]) -> ValueShape:
        """These values."""
        plain, numbers, strings, composite = 0, [], [], []
        for value in values:
            if value is None or isinstance(value, bool):
                plain |= NULL if value is None else TRUE if value else FALSE
            elif isinstance(value, str):
                strings.append(value)
            elif isinstance(value, (int, Decimal)):
                numbers.append(value)
            else:
                composite.append(value)
        empty = self._algebra.no_shape
        return ValueShape(
            plain,
            NumberSet.only(numbers) if numbers else empty.numbers,
            StringSet.only(strings) if strings else empty.strings,
            self._algebra.arrays.join(self._array(value) for value in composite if isinstance(value, list)),
            self._algebra.objects.join(self._object(value) for value in composite if isinstance(value, dict)),
        )

    def _array(self, values: list[Any]) -> ArrayShape:
        nodes = tuple(map(self._value, values))
        return ArrayShape(nodes, self._algebra.nothing, len(values), len(values))

    def _object(self, values: dict[str, Any]) -> ObjectShape:
        named = {key: Property(True, self._value(value)) for key, value in values.items()}
        return ObjectShape(named, (PropertySet(self._algebra.keys.every, self._algebra.nothing),))

    def _value(self, value: Any) -> ValueSet:
        """Just this value; one node for equal values."""
        key = _canonical(value)
        node = self._values.get(key)
        if node is None:
            node = self._values[key] = self._algebra.fixed(self._exactly([value]))
        return node


def _canonical(value: Any) -> Hashable:
    """Equal for equal JSON values: 1 and 1.0 are, false and 0 are not."""
    if isinstance(value, list):
        return ("array", tuple(map(_canonical, value)))
    if isinstance(value, dict):
        return ("object", frozenset((key, _canonical(item)) for key, item in value.items()))
    return ("boolean" if isinstance(value, bool) else "scalar", value)
