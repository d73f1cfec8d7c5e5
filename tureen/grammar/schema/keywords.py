"""The keywords of JSON schema: which a draft has, and what their values must look like. Anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from tureen.errors import echo
from tureen.grammar.expression import GrammarError
from tureen.grammar.schema.document import Document, Draft

MAX_COUNT = 100_000
"""The largest number of characters, items and properties in minLength and its like."""
MAX_BRANCHES = 10_000
"""The largest number of values in "enum", names in "required", schemas in "anyOf" and its like."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ANNOTATIONS = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "$vocabulary", "title", "description", "default", "example",
    "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
})  # fmt: skip
"""They say nothing about which values are valid."""
NOT_KEYWORDS: Mapping[str, str] = {
    "nullable": 'say "type": ["string", "null"] (and so on) instead',
    "optional": 'what is not in "required" is optional',
    "id": 'say "$id" instead',
    "$recursiveRef": 'say "$dynamicRef" instead',
    "$recursiveAnchor": 'say "$dynamicAnchor" instead',
    "additionalItems": 'say "prefixItems" and "items" instead, or "$schema": "http://json-schema.org/draft-07/schema#"',
    "dependencies": (
        'say "dependentRequired" or "dependentSchemas" instead, or "$schema": "http://json-schema.org/draft-07/schema#"'
    ),
}

Check = Callable[[Any], bool]


def check(schema: dict[str, Any], document: Document) -> None:
    """Raises GrammarError for a keyword that is unknown, or has a value of the wrong form."""
    known = KEYWORDS[document.draft]
    for keyword, value in schema.items():
        rule = known.get(keyword)
        if rule is None:
            if keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                raise _unknown(keyword, document.draft, document.where(schema))
        elif not rule[0](value):
            got = echo(json.dumps(value, default=str))
            raise GrammarError(f'"{keyword}" at {document.where(schema)} must be {rule[1]}, got {got}')


def count(schema: dict[str, Any], keyword: str) -> int | None:
    """Returns a number of characters, items or properties; None where the schema has none. Raises GrammarError."""
    value = schema.get(keyword)
    if value is None:
        return None
    if value > MAX_COUNT:
        raise GrammarError(f'"{keyword}" is {echo(str(value))}; at most {MAX_COUNT}: leave it out')
    return int(value)


def dependent(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields each key, and what must hold (a schema) or be there (keys) where the key is there."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        yield from schema.get(keyword, {}).items()


def _unknown(keyword: str, draft: Draft, where: str) -> GrammarError:
    hint = NOT_KEYWORDS.get(keyword, "")
    if not hint and keyword in KEYWORDS["2020-12"]:
        hint = 'it is one of 2020-12: leave "$schema" out'
    if not hint:
        near = get_close_matches(keyword, [*KEYWORDS[draft], *ANNOTATIONS], n=1)
        hint = f'did you mean "{near[0]}"?' if near else 'for a note of your own, let its name begin with "x-"'
    return GrammarError(f"{echo(keyword)} at {where} is no keyword of {draft}: {hint}")


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
    return (
        isinstance(value, list)
        and len(value) <= MAX_BRANCHES
        and all(map(_is_text, value))
        and len(set(value)) == len(value)
    )


def _is_type(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(isinstance(name, str) and name in TYPES for name in value)
    return isinstance(value, str) and value in TYPES


def _is_values(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_BRANCHES


def _is_dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_schema(item) or _is_names(item) for item in value.values())


def _is_named_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is_discriminator(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("propertyName"))


def _is_items(value: Any) -> bool:
    return _is_schema(value) or value == [] or _is_schemas(value)


NUMBER = (_is_number, "a number")
COUNT = (_is_count, "a whole number from 0")
TEXT = (_is_text, "a string")
SCHEMA = (_is_schema, "a schema (an object, true or false)")
SCHEMAS = (_is_schemas, f"a list of 1 to {MAX_BRANCHES} schemas")
NAMED_SCHEMAS = (_is_named_schemas, "an object of schemas")

COMMON: dict[str, tuple[Check, str]] = {
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
    "required": (_is_names, f"a list of at most {MAX_BRANCHES} different strings"),
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
}
KEYWORDS: Mapping[Draft, Mapping[str, tuple[Check, str]]] = {
    "draft-07": {
        **COMMON,
        "items": (_is_items, "a schema or a list of schemas"),
        "additionalItems": SCHEMA,
        "dependencies": (_is_dependencies, "an object of schemas and lists of names"),
    },
    "2020-12": {
        **COMMON,
        "$anchor": TEXT,
        "$dynamicAnchor": TEXT,
        "$dynamicRef": TEXT,
        "items": (_is_schema, 'a schema; for a list of schemas say "prefixItems", or "$schema": a draft-07 one'),
        "prefixItems": SCHEMAS,
        "minContains": COUNT,
        "maxContains": COUNT,
        "dependentRequired": (_is_named_names, "an object of lists of names"),
        "dependentSchemas": NAMED_SCHEMAS,
        "unevaluatedItems": SCHEMA,
        "unevaluatedProperties": SCHEMA,
    },
}

COMBINATORS = frozenset({
    "$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "allOf", "anyOf", "oneOf", "discriminator", "not", "if", "then",
    "else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Keywords that speak through other schemas about the same value, not by themselves."""
