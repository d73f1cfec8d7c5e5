"""The drafts of JSON Schema: which of them a schema is written in, and its keywords as 2020-12 has them.

Only the keywords that a draft has are left. A schema without "$schema" is read as it is meant: it may have the spelling
of any draft, and OpenAPI's "nullable".
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Draft: TypeAlias = Literal["draft-04", "draft-06", "draft-07", "2019-09", "2020-12"]

ORDER: tuple[Draft, ...] = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
DRAFTS: dict[str, Draft] = {
    "draft-04/schema": "draft-04",
    "draft-04/hyper-schema": "draft-04",
    "draft-05/schema": "draft-04",
    "draft-05/hyper-schema": "draft-04",
    "draft-06/schema": "draft-06",
    "draft-06/hyper-schema": "draft-06",
    "draft-07/schema": "draft-07",
    "draft-07/hyper-schema": "draft-07",
    "draft/2019-09/schema": "2019-09",
    "draft/2019-09/hyper-schema": "2019-09",
    "draft/2020-12/schema": "2020-12",
    "draft/2020-12/hyper-schema": "2020-12",
}
SITE = "json-schema.org/"

SINCE: dict[str, Draft] = {
    **dict.fromkeys(("$id", "const", "contains", "propertyNames"), "draft-06"),
    **dict.fromkeys(("if", "then", "else"), "draft-07"),
    **dict.fromkeys(
        ("$anchor", "$recursiveRef", "$recursiveAnchor", "dependentRequired", "dependentSchemas"), "2019-09"
    ),
    **dict.fromkeys(("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"), "2019-09"),
    **dict.fromkeys(("prefixItems", "$dynamicRef", "$dynamicAnchor"), "2020-12"),
}
"""The draft that has a keyword first. In those before it is an annotation."""
MODERNIZED = SINCE.keys() | {
    "$ref", "id", "nullable", "required", "exclusiveMinimum", "exclusiveMaximum", "items", "additionalItems",
    "dependencies", "properties", "contentEncoding",
}  # fmt: skip
"""A schema with none of these is the same in every draft, but for a "type" that is "any": it need not be modernized."""


def declared(schema: Any) -> Draft | None:
    """Returns the draft that "$schema" names; None where there is no such keyword, or it names something else."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(name, str):
        return None
    _, _, rest = name.strip().rstrip("#/").partition("://")
    return DRAFTS.get(rest.removeprefix(SITE)) if rest.startswith(SITE) else None


def modernize(schema: dict[str, Any], draft: Draft | None) -> None:
    """Writes the keywords of one schema, not of those inside it, as 2020-12 does. Spellings that mean one thing only
    are read whatever the draft."""
    if draft is not None:
        _forget(schema, draft)
        if draft in ("draft-06", "draft-07") and schema.get("contentEncoding") == "base64":
            schema.setdefault("format", "base64")  # an annotation since 2019-09
    elif schema.get("nullable") is True:
        _add_null(schema)
    if draft == "draft-04" and isinstance(schema.get("id"), str):
        schema["$id"] = schema.pop("id")
    if "$recursiveRef" in schema and draft in (None, "2019-09"):
        schema.setdefault("$dynamicRef", schema.pop("$recursiveRef"))
    if schema.get("type") == "any":
        del schema["type"]
    if isinstance(schema.get("required"), bool):  # see _modernize_required
        del schema["required"]
    for bound, name in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(name), bool) and schema.pop(name) and bound in schema:
            schema[name] = schema.pop(bound)
    _modernize_items(schema)
    _modernize_dependencies(schema)
    _modernize_required(schema)


def _forget(schema: dict[str, Any], draft: Draft) -> None:
    """Takes out what the draft does not have; beside "$ref" the drafts up to 7 have nothing."""
    age = ORDER.index(draft)
    if age <= ORDER.index("draft-07") and isinstance(schema.get("$ref"), str):
        for keyword in [keyword for keyword in schema if keyword != "$ref"]:
            del schema[keyword]
    for keyword in schema.keys() & SINCE.keys():
        if ORDER.index(SINCE[keyword]) > age:
            del schema[keyword]


def _add_null(schema: dict[str, Any]) -> None:
    """OpenAPI 3.0: "nullable" beside "type" is one more type."""
    names = schema.get("type")
    if isinstance(names, str):
        schema["type"] = [names, "null"]
    elif isinstance(names, list):
        schema["type"] = [*names, "null"]


def _modernize_items(schema: dict[str, Any]) -> None:
    more = schema.pop("additionalItems", None)
    items = schema.get("items")
    if isinstance(items, list):
        del schema["items"]
        if items:
            schema["prefixItems"] = items
        if more is not None:
            schema["items"] = more


def _modernize_dependencies(schema: dict[str, Any]) -> None:
    dependencies = schema.get("dependencies")
    if not isinstance(dependencies, dict):
        return
    del schema["dependencies"]
    for key, needed in dependencies.items():
        if isinstance(needed, str):
            needed = [needed]
        keyword = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        both = schema.setdefault(keyword, {})
        if isinstance(both, dict):
            schema[keyword] = {**both, key: both.get(key, needed)}


def _modernize_required(schema: dict[str, Any]) -> None:
    """Draft 3 says inside a property that it is required."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    names = [key for key, inside in properties.items() if isinstance(inside, dict) and inside.get("required") is True]
    required = schema.get("required", [])
    if names and isinstance(required, list):
        schema["required"] = [*required, *(key for key in names if key not in required)]
