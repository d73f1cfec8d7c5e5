"""The keywords of JSON schema, in the words of 2020-12, and what their values must look like.

Anything else is an annotation, as the specification says, unless it is nearly a keyword: `minLenght` is a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from tureen.errors import echo, excerpt
from tureen.grammar import regex
from tureen.grammar.expression import GrammarError, SchemaError
from tureen.grammar.schema.annotations import is_annotation, nearest
from tureen.grammar.schema.document import Document

MAX_COUNT = 100_000
"""The largest number of characters, items and properties in minLength and its like."""
OUT_OF_REACH = 1 << 30
"""No output has this many characters, items or properties: generators of schemas write such bounds and mean none."""
MAX_BRANCHES = 100_000
"""The largest number of values in "enum", names in "required", schemas in "anyOf" and its like."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

Check = Callable[[Any], bool]


def check(schema: dict[str, Any], document: Document) -> None:
    """Raises SchemaError for a keyword whose value has the wrong form, and for a name that is nearly one."""
    for keyword, value in schema.items():
        rule = KEYWORDS.get(keyword)
        if rule is None:
            near = "" if is_annotation(keyword) else nearest(keyword, MISTAKABLE)
            if near and near not in schema and KEYWORDS[near][0](value):
                where = document.where(schema)
                raise SchemaError(f'{echo(keyword)} at {where} is not a JSON Schema keyword: did you mean "{near}"?')
        elif not rule[0](value):
            is_long = isinstance(value, list) and len(value) > MAX_BRANCHES
            got = f"{len(value)} of them" if is_long else excerpt(json.dumps(value, default=str))
            raise SchemaError(f'"{keyword}" at {document.where(schema)} must be {rule[1]}, got {got}')
    for pattern in patterns(schema):
        try:
            regex.check_form(pattern, flavour="ecma")
        except SchemaError as error:
            raise SchemaError(f"{error} at {document.where(schema)}") from None


def patterns(schema: dict[str, Any]) -> Iterator[str]:
    """Yields the patterns that a schema itself has."""
    if "pattern" in schema:
        yield schema["pattern"]
    yield from schema.get("patternProperties", ())


def count(schema: dict[str, Any], keyword: str) -> int | None:
    """Returns a number of characters, items or properties; None where the schema has none. Raises GrammarError."""
    value = schema.get(keyword)
    if value is None:
        return None
    if value > MAX_COUNT:
        raise GrammarError(f'"{keyword}" is {echo(str(value))}; at most {MAX_COUNT}: leave it out')
    return int(value)


def most(schema: dict[str, Any], keyword: str) -> int | None:
    """Returns an upper bound as `count` does; one that no output reaches is none. Raises GrammarError."""
    return None if schema.get(keyword, 0) >= OUT_OF_REACH else count(schema, keyword)


def dependent(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each key, and what must hold (a schema) or be there (keys) where the key is there."""
    for keyword in ("dependentRequired", "dependentSchemas"):
        yield from schema.get(keyword, {}).items()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    # A large exponent is not expanded: what is above the limit is refused by its value.
    return _is_number(value) and value >= 0 and (value > MAX_COUNT or value == int(value))


def _is_factor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_BRANCHES and all(map(_is_schema, value))


def _is_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_BRANCHES and all(map(_is_text, value))


def _is_type(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(isinstance(name, str) and name in TYPES for name in value)
    return isinstance(value, str) and value in TYPES


def _is_values(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_BRANCHES


def _is_named_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is_discriminator(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("propertyName"))


NUMBER = (_is_number, "a number")
COUNT = (_is_count, "a whole number from 0")
TEXT = (_is_text, "a string")
SCHEMA = (_is_schema, "a schema (an object, true or false)")
SCHEMAS = (_is_schemas, f"a list of 1 to {MAX_BRANCHES} schemas")
NAMED_SCHEMAS = (_is_named_schemas, "an object of schemas")

KEYWORDS: Mapping[str, tuple[Check, str]] = {
    "discriminator": (_is_discriminator, 'an object with "propertyName", a string'),
    "$ref": TEXT,
    "type": (_is_type, "one or a list of " + ", ".join(TYPES)),
    "enum": (_is_values, f"a list of at most {MAX_BRANCHES} values"),
    "const": (lambda value: True, ""),
    "multipleOf": (_is_factor, "a number above 0"),
    "maximum": NUMBER,
    "exclusiveMaximum": NUMBER,
    "minimum": NUMBER,
    "exclusiveMinimum": NUMBER,
    "maxLength": COUNT,
    "minLength": COUNT,
    "pattern": TEXT,
    "format": TEXT,
    "maxItems": COUNT,
    "minItems": COUNT,
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "contains": SCHEMA,
    "maxProperties": COUNT,
    "minProperties": COUNT,
    "required": (_is_names, f"a list of at most {MAX_BRANCHES} strings"),
    "properties": NAMED_SCHEMAS,
    "patternProperties": NAMED_SCHEMAS,
    "additionalProperties": SCHEMA,
    "propertyNames": SCHEMA,
    "allOf": SCHEMAS,
    "anyOf": SCHEMAS,
    "oneOf": SCHEMAS,
    "not": SCHEMA,
    "if": SCHEMA,
    "then": SCHEMA,
    "else": SCHEMA,
    "$anchor": TEXT,
    "$dynamicAnchor": TEXT,
    "$dynamicRef": TEXT,
    "items": SCHEMA,
    "prefixItems": SCHEMAS,
    "minContains": COUNT,
    "maxContains": COUNT,
    "dependentRequired": (_is_named_names, "an object of lists of names"),
    "dependentSchemas": NAMED_SCHEMAS,
    "unevaluatedItems": SCHEMA,
    "unevaluatedProperties": SCHEMA,
}
MISTAKABLE = tuple(keyword for keyword in KEYWORDS if keyword.isalpha() and keyword != "discriminator")
"""The keywords that a mistake in typing may be meant for."""

COMBINATORS = frozenset({
    "$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "allOf", "anyOf", "oneOf", "discriminator", "not", "if", "then",
    "else", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Keywords that speak through other schemas about the same value, not by themselves."""
