"""A JSON schema as a document: parsed within limits, its references resolved inside it and never fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, NoReturn, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from tureen.errors import echo
from tureen.grammar.expression import GrammarError
from tureen.grammar.json_text import exact

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 128
"""The deepest nesting of the schema's JSON text, a property inside a property being two levels."""

Draft: TypeAlias = Literal["draft-07", "2020-12"]
Schema: TypeAlias = dict[str, Any] | bool

DRAFTS: dict[str, Draft] = {
    "https://json-schema.org/draft/2020-12/schema": "2020-12",
    "http://json-schema.org/draft-07/schema": "draft-07",
    "https://json-schema.org/draft-07/schema": "draft-07",
}
ONE_INSIDE = (
    "additionalProperties", "items", "contains", "propertyNames", "not", "if", "then", "else", "additionalItems",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
SEVERAL_INSIDE = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_INSIDE = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


@dataclass(eq=False, slots=True)
class Resource:
    """A schema with an identifier of its own (the whole document is one), and the anchors in it."""

    uri: str
    root: Schema
    anchors: dict[str, Schema] = field(default_factory=dict)
    dynamic: dict[str, Schema] = field(default_factory=dict)


Scope: TypeAlias = tuple[Resource, ...]
"""The resources gone through on the way to a schema, outermost first; empty where no "$dynamicRef" asks for it."""


def parse(text: str) -> Any:
    """Reads a schema's text; numbers with a fraction or exponent come as Decimal. Raises GrammarError."""
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(f"json_schema is too large: {len(text)} characters; at most {MAX_CHARACTERS}")
    try:
        value = json.loads(text, parse_float=_exact, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise GrammarError(f"json_schema is nested too deep; at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise GrammarError(f"json_schema is not valid JSON: {error}") from None
    _check_depth(value)
    if "\\ud" in text.lower():
        _check_surrogates(value)
    return value


def _exact(digits: str) -> Decimal:
    return exact(digits, "json_schema")


def _no_constant(name: str) -> NoReturn:
    raise GrammarError(f"json_schema is not valid JSON: {name} is not a number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise GrammarError(f"json_schema has the key {echo(twice)} twice in one object")
    return value


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise GrammarError("json_schema holds half of a surrogate pair (\\ud800 to \\udfff); no text can") from None


def _check_depth(value: Any) -> None:
    layer, depth = [value], 0
    while layer:
        depth += 1
        if depth > MAX_DEPTH:
            raise GrammarError(f"json_schema is nested too deep; at most {MAX_DEPTH} levels")
        below: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        layer = below


class Document:
    """The schemas of one document, by identity (`id` of the parsed object)."""

    def __init__(self, root: Any) -> None:
        if not isinstance(root, (dict, bool)):
            raise GrammarError(f"json_schema must be an object or a boolean, got {echo(json.dumps(root, default=str))}")
        self.root: Schema = root
        self.draft = _draft(root)
        self.has_dynamic = False
        self._resources: dict[str, Resource] = {}
        self._home: dict[int, Resource] = {}
        self._path: dict[int, tuple[str, ...]] = {}
        whole = Resource("", root)
        self._resources[""] = whole
        self._index(root, whole, ())

    def where(self, schema: Schema) -> str:
        """Returns the place of a schema, for messages: "#/properties/a"."""
        path = self._path.get(id(schema), ())
        return echo("#" + "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path))

    def resource(self, schema: Schema) -> Resource:
        """Returns the resource that a schema, an object, belongs to."""
        return self._home[id(schema)]

    def resolve(self, reference: str, schema: Schema) -> tuple[Schema, Resource, str]:
        """Returns the schema that `reference` in `schema` points to, the resource it is in, and the fragment. Raises
        GrammarError."""
        resource = self.resource(schema)
        fragment = reference[1:]
        if not reference.startswith("#"):
            try:
                uri, fragment = urldefrag(urljoin(resource.uri, reference))
            except ValueError:
                raise self._unresolved(reference, schema) from None
            known = self._resources.get(uri)
            if known is None:
                raise self._unresolved(reference, schema)
            resource = known
        fragment = unquote(fragment)
        if fragment == "":
            return resource.root, resource, fragment
        if not fragment.startswith("/"):
            target = resource.anchors.get(fragment)
            if target is None:
                raise self._unresolved(reference, schema)
            return target, resource, fragment
        target = self._follow(resource, fragment)
        if not isinstance(target, (dict, bool)):
            raise self._unresolved(reference, schema)
        return target, self._home[id(target)] if isinstance(target, dict) else resource, fragment

    def _unresolved(self, reference: str, schema: Schema) -> GrammarError:
        return GrammarError(
            f'"$ref" {echo(reference)} at {self.where(schema)} leads to no schema in this document;'
            f' nothing is fetched: put what it means under "$defs" and point there ("#/$defs/name")'
        )

    def _follow(self, resource: Resource, pointer: str) -> Any:
        place: Any = resource.root
        path = self._path.get(id(place), ())
        for token in pointer.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            path = (*path, token)
            if isinstance(place, list) and token.isascii() and token.isdigit() and int(token[:9]) < len(place):
                place = place[int(token[:9])]
            elif isinstance(place, dict) and token in place:
                place = place[token]
            else:
                return None
            resource = self._home.get(id(place), resource)
        if isinstance(place, dict) and id(place) not in self._home:
            self._index(place, resource, path)
        return place

    def _index(self, root: Schema, resource: Resource, path: tuple[str, ...]) -> None:
        waiting: list[tuple[Any, Resource, tuple[str, ...]]] = [(root, resource, path)]
        while waiting:
            schema, resource, path = waiting.pop()
            if not isinstance(schema, dict):
                continue
            self._path[id(schema)] = path
            self._home[id(schema)] = resource = self._identify(schema, resource)
            for key in schema.keys() & NAMED_INSIDE:
                inside = schema[key]
                if isinstance(inside, dict):
                    waiting += [(item, resource, (*path, key, name)) for name, item in inside.items()]
            for key in schema.keys() & ONE_INSIDE:
                waiting.append((schema[key], resource, (*path, key)))
            for key in schema.keys() & SEVERAL_INSIDE:
                inside = schema[key]
                if isinstance(inside, list):
                    waiting += [(item, resource, (*path, key, str(i))) for i, item in enumerate(inside)]

    def _identify(self, schema: dict[str, Any], resource: Resource) -> Resource:
        if "$dynamicRef" in schema:
            self.has_dynamic = True
        name = schema.get("$id")
        if isinstance(name, str) and not (self.draft == "draft-07" and "$ref" in schema):
            if self.draft == "draft-07" and name.startswith("#"):
                _add_anchor(resource, name[1:], schema)
            else:
                resource = self._new_resource(name, schema, resource)
        for keyword in ("$anchor", "$dynamicAnchor") if self.draft == "2020-12" else ():
            name = schema.get(keyword)
            if isinstance(name, str):
                _add_anchor(resource, name, schema)
                if keyword == "$dynamicAnchor":
                    resource.dynamic[name] = schema
        return resource

    def _new_resource(self, name: str, schema: dict[str, Any], parent: Resource) -> Resource:
        if "$schema" in schema and _draft(schema) != self.draft:
            raise GrammarError('"$schema" must be the same in the whole document')
        try:
            uri = urldefrag(urljoin(parent.uri, name)).url
        except ValueError:
            raise GrammarError(f'"$id" {echo(name)} is not a URI') from None
        known = self._resources.get(uri)
        if schema is self.root:
            known = None
        if known is not None and known.root is not schema:
            raise GrammarError(f'"$id" {echo(name)} names two schemas')
        self._resources[uri] = resource = known or Resource(uri, schema)
        return resource


def _add_anchor(resource: Resource, name: str, schema: Schema) -> None:
    if resource.anchors.setdefault(name, schema) is not schema:
        raise GrammarError(f"the anchor {echo(name)} names two schemas")


def _draft(schema: Schema) -> Draft:
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if name is None:
        return "2020-12"
    draft = DRAFTS.get(name.rstrip("#")) if isinstance(name, str) else None
    if draft is None:
        known = " and ".join(DRAFTS)
        raise GrammarError(f'"$schema" {echo(str(name))} is not known; known are {known}')
    return draft
