"""The keywords by which a schema itself limits values: types, exact values, numbers, strings, arrays and objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

from tureen.grammar.schema import arrays
from tureen.grammar.schema.algebra import NOT_EXACT, Algebra
from tureen.grammar.schema.document import Document, Schema, Scope
from tureen.grammar.schema.formats import format_strings
from tureen.grammar.schema.keywords import COMBINATORS, KEYWORDS, count, most
from tureen.grammar.schema.numbers import NumberSet
from tureen.grammar.schema.shapes import (
    ALL_KINDS,
    FALSE,
    NULL,
    NUMBERS,
    OBJECTS,
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
from tureen.grammar.schema.unenforced import Origin, UnenforcedKeywords

T = TypeVar("T")

OWN_KEYWORDS = KEYWORDS.keys() - COMBINATORS
ARRAY_KEYWORDS = frozenset(("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"))
OBJECT_KEYWORDS = frozenset((
    "properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties",
    "maxProperties",
))  # fmt: skip
BESIDE_TYPES = OWN_KEYWORDS - {"type"}
OPEN_KEYWORDS = frozenset(("additionalProperties", "patternProperties", "propertyNames"))
NUMBER_KEYWORDS: dict[str, Callable[[Any], NumberSet]] = {
    "minimum": lambda value: NumberSet.between(least=value),
    "maximum": lambda value: NumberSet.between(most=value),
    "exclusiveMinimum": lambda value: NumberSet.between(above=value),
    "exclusiveMaximum": lambda value: NumberSet.between(below=value),
    "multipleOf": NumberSet.multiples_of,
}

ReadNode = Callable[[Schema, Scope], ValueSet]


class Own:
    """Reads schemas of one document without their combinators and references."""

    def __init__(self, document: Document, algebra: Algebra, node: ReadNode, unenforced: UnenforcedKeywords) -> None:
        self._document = document
        self._algebra = algebra
        self._node = node
        self._unenforced = unenforced
        self._values: dict[Hashable, ValueSet] = {}
        self._of_types: dict[frozenset[str], ValueShape] = {}  # all values of some types

    def read(self, schema: dict[str, Any], scope: Scope) -> ValueShape:
        """Returns the values that the keywords allow, without what cannot be enforced, which is noted. Raises
        SchemaError."""
        names = schema.get("type")
        types = None if names is None else frozenset([names] if isinstance(names, str) else names)
        if types is not None and BESIDE_TYPES.isdisjoint(schema):  # as of most
            known = self._of_types.get(types)
            if known is None:
                known = self._of_types[types] = self._typed(schema, scope, types)
            return known
        shape = self._typed(schema, scope, types)
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = schema["enum"] if keyword == "enum" else [schema["const"]]
                with self._unenforced.at(Origin(keyword, schema)):
                    shape = self._with_values(shape, values)
        return shape

    def _with_values(self, shape: ValueShape, values: list[Any]) -> ValueShape:
        """Returns those of the values that are in the shape."""
        exactly = self._unenforced.attempt(lambda: self._exactly(values), None)
        return replace(shape, loose=ALL_KINDS) if exactly is None else self._algebra.meet(exactly, shape)

    def _attempt(self, keyword: str, schema: dict[str, Any], make: Callable[[], T], otherwise: T) -> T:
        """Returns what `make` makes of a keyword's value; `otherwise`, and it is noted, where that cannot be
        enforced."""
        return self._unenforced.attempt(make, otherwise, Origin(keyword, schema))

    def _count(self, keyword: str, schema: dict[str, Any]) -> int:
        if keyword not in schema:
            return 0
        return self._attempt(keyword, schema, lambda: count(schema, keyword), None) or 0

    def _most(self, keyword: str, schema: dict[str, Any]) -> int | None:
        if keyword not in schema:
            return None
        return self._attempt(keyword, schema, lambda: most(schema, keyword), None)

    def _typed(self, schema: dict[str, Any], scope: Scope, types: frozenset[str] | None) -> ValueShape:
        empty = self._algebra.no_shape
        plain = (NULL if types is None or "null" in types else 0) | (
            TRUE | FALSE if types is None or "boolean" in types else 0
        )
        numbers, strings, arrays_, objects_ = empty, empty, empty, empty
        if types is None or not types.isdisjoint(("number", "integer")):
            numbers = self._numbers(schema, types)
        if types is None or "string" in types:
            strings = self._strings(schema)
        if types is None or "array" in types:
            arrays_ = self._arrays(schema, scope)
        if types is None or "object" in types:
            objects_ = self._objects(schema, scope)
        return ValueShape(
            plain,
            numbers.numbers,
            strings.strings,
            arrays_.arrays,
            objects_.objects,
            strings.partial | objects_.partial,
            numbers.loose | strings.loose | arrays_.loose | objects_.loose,
        )

    def _numbers(self, schema: dict[str, Any], types: frozenset[str] | None) -> ValueShape:
        is_integer = types is not None and "number" not in types
        numbers, loose = NumberSet.integers() if is_integer else NumberSet.anything(), 0
        for keyword, read in NUMBER_KEYWORDS.items():
            if keyword in schema:
                limited = self._attempt(keyword, schema, partial(_limited, numbers, read, schema[keyword]), None)
                numbers, loose = (numbers, NUMBERS) if limited is None else (limited, loose)
        return ValueShape(numbers=numbers, loose=loose)

    def _strings(self, schema: dict[str, Any]) -> ValueShape:
        strings, loose = StringSet.anything(), 0
        least, greatest = self._count("minLength", schema), self._most("maxLength", schema)
        if least or greatest is not None:
            strings = self._algebra.keys.of_length(least, greatest)
        if "pattern" in schema:
            read = partial(self._algebra.keys.pattern, schema["pattern"])
            pattern = self._attempt("pattern", schema, read, None)
            strings, loose = (strings, STRINGS) if pattern is None else (self._algebra.keys.both(strings, pattern), 0)
        in_format = format_strings(schema["format"]) if "format" in schema else None
        if in_format is None:
            return ValueShape(strings=strings, loose=loose)
        return ValueShape(strings=self._algebra.keys.both(strings, in_format), loose=loose, partial=STRINGS)

    def _arrays(self, schema: dict[str, Any], scope: Scope) -> ValueShape:
        if ARRAY_KEYWORDS.isdisjoint(schema):
            return ValueShape(arrays=(self._algebra.any_array,))
        item_counts = []
        if "contains" in schema:
            least = self._count("minContains", schema) if "minContains" in schema else 1
            node = self._node(schema["contains"], scope)
            item_counts.append(ItemCount(0, node, least, self._most("maxContains", schema)))
        shape = ArrayShape(
            tuple(self._node(item, scope) for item in schema.get("prefixItems", ())),
            self._node(schema.get("items", True), scope),
            self._count("minItems", schema),
            self._most("maxItems", schema),
            tuple(item_counts),
            schema.get("uniqueItems", False),
        )
        tidied = arrays.tidy(self._algebra, shape)
        return ValueShape(arrays=() if tidied is None else (tidied,))

    def _objects(self, schema: dict[str, Any], scope: Scope) -> ValueShape:
        if OBJECT_KEYWORDS.isdisjoint(schema):
            return ValueShape(objects=(self._algebra.any_object,))
        sets = self._algebra.keys
        others = self._node(schema.get("additionalProperties", True), scope)
        patterns, unknown = self._patterns(schema, scope)
        if unknown:  # any key may be one of theirs
            others = self._algebra.any_of([others, *unknown])
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        named = {}
        for key in dict.fromkeys((*properties, *required)):
            nodes = [self._node(properties[key], scope)] if key in properties else []
            nodes += [node for names, node in patterns if names.contains(key)]
            named[key] = self._algebra.all_of(nodes) if nodes else others
        classes = self._attempt("patternProperties", schema, lambda: self._classes(patterns), None)
        if classes is None:  # too many
            unknown = [node for _, node in patterns]
            classes = [(sets.every, (self._algebra.any_of([others, *unknown]),))]
        free = [PropertySet(names, self._algebra.all_of(nodes) if nodes else others) for names, nodes in classes]
        names = self._algebra.any_shape
        if "propertyNames" in schema:
            names = self._algebra.shape(self._node(schema["propertyNames"], scope))
            parts = self._attempt("propertyNames", schema, lambda: sets.split(free, names.strings), None)
            if names.loose & STRINGS:
                self._unenforced.note(NOT_EXACT, Origin("propertyNames", schema))
            if parts is None:
                names = replace(self._algebra.any_shape, loose=STRINGS)
            else:
                nothing = self._algebra.nothing
                free = [PropertySet(part, node if is_inside else nothing) for part, node, is_inside in parts]
                named = {key: node if names.strings.contains(key) else nothing for key, node in named.items()}
        is_required = set(required)
        shape = ObjectShape(
            {key: Property(key in is_required, node) for key, node in named.items()},
            tuple(free),
            self._count("minProperties", schema),
            self._most("maxProperties", schema),
            is_open=not OPEN_KEYWORDS.isdisjoint(schema),
        )
        return ValueShape(
            objects=(shape,),
            partial=OBJECTS if names.partial & STRINGS else 0,
            loose=OBJECTS if unknown or names.loose & STRINGS else 0,
        )

    def _patterns(
        self, schema: dict[str, Any], scope: Scope
    ) -> tuple[list[tuple[StringSet, ValueSet]], list[ValueSet]]:
        """Returns the keys and values of "patternProperties"; and only the values where the pattern cannot be
        enforced."""
        known, unknown = [], []
        for pattern, value in schema.get("patternProperties", {}).items():
            node = self._node(value, scope)
            read = partial(self._algebra.keys.pattern, pattern)
            names = self._attempt("patternProperties", schema, read, None)
            if names is None:
                unknown.append(node)
            else:
                known.append((names, node))
        return known, unknown

    def _classes(self, patterns: list[tuple[StringSet, ValueSet]]) -> list[tuple[StringSet, tuple[ValueSet, ...]]]:
        """Returns disjoint sets of keys, each with the nodes of the patterns that its keys match. Raises
        GrammarError."""
        classes: list[tuple[StringSet, tuple[ValueSet, ...]]] = [(self._algebra.keys.every, ())]
        for names, node in patterns:
            parts = self._algebra.keys.split(classes, names)
            classes = [(part, (*nodes, node) if is_inside else nodes) for part, nodes, is_inside in parts]
        return classes

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


def _limited(numbers: NumberSet, read: Callable[[Any], NumberSet], value: Any) -> NumberSet:
    return numbers.intersect(read(value))


def _canonical(value: Any) -> Hashable:
    """Equal for equal JSON values: 1 and 1.0 are, false and 0 are not."""
    if isinstance(value, list):
        return ("array", tuple(map(_canonical, value)))
    if isinstance(value, dict):
        return ("object", frozenset((key, _canonical(item)) for key, item in value.items()))
    return ("boolean" if isinstance(value, bool) else "scalar", value)
