"""The keywords of JSON schema that have schemas inside, of all drafts."""

ONE_INSIDE = frozenset((
    "additionalProperties", "items", "contains", "propertyNames", "not", "if", "then", "else", "additionalItems",
    "unevaluatedProperties", "unevaluatedItems",
))  # fmt: skip
SEVERAL_INSIDE = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
NAMED_INSIDE = frozenset((
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies",
))  # fmt: skip
INSIDE = ONE_INSIDE | SEVERAL_INSIDE | NAMED_INSIDE
