"""A JSON schema as a document: parsed within limits, its references resolved inside it or to the official meta-schemas,
and never fetched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from tureen.errors import echo
from tureen.grammar.expression import SchemaError
from tureen.grammar.json_text import exact
from tureen.grammar.schema.drafts import MODERNIZED, Draft, declared, modernize
from tureen.grammar.schema.equal_schemas import EqualSchemas
from tureen.grammar.schema.meta_schemas import is_dynamic, official, official_uri
from tureen.grammar.schema.subschemas import INSIDE, NAMED_INSIDE, ONE_INSIDE, SEVERAL_INSIDE

MAX_DEPTH = 128
"""The deepest nesting of the schema's JSON text, a property inside a property being two levels."""

PLACING = MODERNIZED | {"$dynamicRef", "$anchor", "$dynamicAnchor", "$recursiveAnchor"}
"""A schema with none of these only needs to know the resource that it is in; see also MODERNIZED."""

Schema: TypeAlias = dict[str, Any] | bool


@dataclass(eq=False, slots=True)
class Resource:
    """A schema with an identifier of its own (the whole document is one), and the anchors in it."""

    uri: str
    root: Schema
    draft: Draft | None  # None: of any
    anchors: dict[str, Schema] = field(default_factory=dict)
    dynamic: dict[str, Schema] = field(default_factory=dict)
    ambiguous: set[str] = field(default_factory=set)  # anchors of several schemas


Scope: TypeAlias = tuple[Resource, ...]
"""The resources gone through on the way to a schema that have a dynamic anchor first, outermost first."""


def parse(text: str) -> Any:
    """Reads a schema's text; numbers with a fraction or exponent come as Decimal. Raises SchemaError."""
    try:
        value = DECODER.decode(text)
    except RecursionError:
        raise SchemaError(f"json_schema is nested too deep; at most {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise SchemaError(f"json_schema is not valid JSON: {error}") from None
    if text.count("[") + text.count("{") >= MAX_DEPTH:  # of most it is plain to see
        _check_depth(value)
    if "\\ud" in text.lower():
        _check_surrogates(value)
    return value


def _exact(digits: str) -> Decimal:
    return exact(digits, "json_schema")


def _no_constant(name: str) -> NoReturn:
    raise SchemaError(f"json_schema is not valid JSON: {name} is not a number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise SchemaError(f"json_schema has the key {echo(twice)} twice in one object")
    return value


DECODER = json.JSONDecoder(parse_float=_exact, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SchemaError("json_schema holds half of a surrogate pair (\\ud800 to \\udfff); no text can") from None


def _check_depth(value: Any) -> None:
    layer, depth = [value], 0
    while layer:
        depth += 1
        if depth > MAX_DEPTH:
            raise SchemaError(f"json_schema is nested too deep; at most {MAX_DEPTH} levels")
        below: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        layer = below


class Document:
    """The schemas of one document, by identity (`id` of the parsed object), each in the words of 2020-12."""

    def __init__(self, root: Any) -> None:
        """`root` is changed: see `modernize`."""
        if not isinstance(root, (dict, bool)):
            raise SchemaError(f"json_schema must be an object or a boolean, got {echo(json.dumps(root, default=str))}")
        self.root: Schema = root
        self.has_dynamic = False
        self._resources: dict[str, Resource] = {}
        self._home: dict[int, Resource] = {}
        self._schemas: list[dict[str, Any]] = []
        self._path: dict[int, tuple[str, ...]] = {}
        self._equal = EqualSchemas(self._schemas, self._home)
        self._written: dict[int, dict[str, Any]] = {}  # as the document has them, which pointers go by
        self._official: set[str] = set()  # the URIs of the meta-schemas that were referred to
        self._twice: set[str] = set()  # URIs of several schemas, by which none can be meant
        whole = Resource("", root, declared(root))
        self._resources[""] = whole
        self._index(root, whole, ())

    def modern(self) -> Schema:
        """Returns the whole document in the words of 2020-12, with what only references lead to."""
        for schema in self._schemas:  # which grows
            if isinstance(schema.get("$ref"), str):
                with suppress(SchemaError):
                    self.resolve(schema["$ref"], schema)
        return self.root

    def all_like(self, schema: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Returns the schemas that say the same as one, with it, in an order that is always the same."""
        return self._equal.all_like(schema)

    def where(self, schema: Schema) -> str:
        """Returns the place of a schema, for messages: "#/properties/a"."""
        return echo(self.pointer(schema))

    def pointer(self, schema: Schema) -> str:
        """Returns the place of a schema as a JSON pointer: "#/properties/a"; in a meta-schema after its URI."""
        path, start = self._path.get(id(schema), ()), "#"
        if path and path[0] in self._official:
            path, start = path[1:], f"{path[0]}#"
        return start + "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)

    def resource(self, schema: Schema) -> Resource:
        """Returns the resource that a schema, an object, belongs to."""
        return self._home[id(schema)]

    def resolve(self, reference: str, schema: Schema) -> tuple[Schema, Resource, str]:
        """Returns the schema that `reference` in `schema` points to, the resource it is in, and the fragment. Raises
        SchemaError."""
        resource = self.resource(schema)
        fragment = reference[1:]
        if not reference.startswith("#"):
            try:
                uri, fragment = urldefrag(urljoin(resource.uri, reference))
            except ValueError:
                raise self._unresolved(reference, schema) from None
            if uri in self._twice:
                raise SchemaError(f'"$ref" {echo(reference)} at {self.where(schema)}: this "$id" names two schemas')
            known = self._resources.get(uri) or self._meta_schema(uri)
            if known is None:
                raise self._unresolved(reference, schema)
            resource = known
        fragment = unquote(fragment)
        target = self._find(resource, fragment, schema)
        if target is None and reference.startswith("#"):  # many take it for the document's
            resource = self._resources[""]
            target = self._find(resource, fragment, schema)
        if target is None:
            raise self._unresolved(reference, schema)
        if fragment.startswith("/") and isinstance(target, dict):
            resource = self._home[id(target)]
        return target, resource, fragment

    def _meta_schema(self, uri: str) -> Resource | None:
        known = official_uri(uri)
        if known is None:
            return None
        if known not in self._resources:
            self._official.add(known)
            root = official(known)
            self._index(root, Resource(known, root, declared(root)), (known,))
        return self._resources[known]

    def _find(self, resource: Resource, fragment: str, schema: Schema) -> Schema | None:
        """Raises SchemaError for a name that several schemas have."""
        if fragment == "":
            return resource.root
        if fragment.startswith("/"):
            target = self._follow(resource, fragment)
            return target if isinstance(target, (dict, bool)) else None
        if fragment in resource.ambiguous:
            raise SchemaError(f"the anchor {echo(fragment)}, meant at {self.where(schema)}, names two schemas")
        return resource.anchors.get(fragment)

    def _unresolved(self, reference: str, schema: Schema) -> SchemaError:
        return SchemaError(
            f'"$ref" {echo(reference)} at {self.where(schema)} leads to no schema in this document;'
            f' nothing is fetched: put what it means under "$defs" and point there ("#/$defs/name")'
        )

    def _follow(self, resource: Resource, pointer: str) -> Any:
        place: Any = resource.root
        path = self._path.get(id(place), ())
        for token in pointer.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            path = (*path, token)
            place = self._written.get(id(place), place)
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
            if not isinstance(schema, dict) or id(schema) in self._home:
                continue
            self._schemas.append(schema)
            self._path[id(schema)] = path
            written = schema
            if PLACING.isdisjoint(schema) and schema.get("type") != "any":  # as of most
                self._home[id(schema)] = resource
            else:
                written = dict(schema)
                resource = self._enter(schema, resource)
                if schema.keys() != written.keys():
                    self._written[id(schema)] = written
            for key, value in () if INSIDE.isdisjoint(written) else written.items():
                waiting += [(item, resource, (*path, *more)) for item, more in _inside(key, value)]

    def _enter(self, schema: dict[str, Any], resource: Resource) -> Resource:
        """Returns the resource that a schema is in, once its keywords are those of 2020-12."""
        draft = (declared(schema) or resource.draft) if "$id" in schema or "id" in schema else resource.draft
        has_anchor = schema.get("$recursiveAnchor") is True and draft in (None, "2019-09")
        if not MODERNIZED.isdisjoint(schema) or schema.get("type") == "any":
            modernize(schema, draft)
        self._home[id(schema)] = resource = self._identify(schema, resource, draft)
        if "$dynamicRef" in schema or is_dynamic(str(schema.get("$ref"))):
            self.has_dynamic = True
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = schema.get(keyword)
            if isinstance(name, str):
                _add_anchor(resource, name, schema)
                if keyword == "$dynamicAnchor":
                    resource.dynamic[name] = schema
        if has_anchor and schema is resource.root:
            resource.dynamic[""] = schema
        return resource

    def _identify(self, schema: dict[str, Any], resource: Resource, draft: Draft | None) -> Resource:
        """Returns the resource that the schema is, or is in."""
        name = schema.get("$id")
        if isinstance(name, str):
            if name.startswith("#"):
                _add_anchor(resource, name[1:], schema)
                return resource
            return self._new_resource(name, schema, resource, draft)
        name = schema.get("id")
        if draft is None and isinstance(name, str):  # it may be meant as one: it can be referred to
            uri = _joined(resource.uri, name)
            if uri is not None and not name.startswith("#"):
                self._resources.setdefault(uri, Resource(uri, schema, draft))
            elif uri is not None:
                _add_anchor(resource, name[1:], schema)
        return resource

    def _new_resource(self, name: str, schema: dict[str, Any], parent: Resource, draft: Draft | None) -> Resource:
        uri = _joined(parent.uri, name)
        if uri is None:
            return parent
        resource = Resource(uri, schema, draft)
        if uri in self._resources and schema is not self.root:
            self._twice.add(uri)
        else:
            self._resources[uri] = resource
        if schema is self.root:
            self._resources[""] = resource
        return resource


def _inside(keyword: str, value: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Returns the schemas in the value of a keyword, each with the way to it."""
    if keyword not in INSIDE:
        return []
    if isinstance(value, dict) and keyword in NAMED_INSIDE:
        return [(item, (keyword, name)) for name, item in value.items()]
    if isinstance(value, dict) and keyword in ONE_INSIDE:
        return [(value, (keyword,))]
    if isinstance(value, list) and keyword in SEVERAL_INSIDE:
        return [(item, (keyword, str(index))) for index, item in enumerate(value)]
    return []


def _joined(base: str, name: str) -> str | None:
    """Returns a URI without its fragment; None where the name is none."""
    try:
        return urldefrag(urljoin(base, name)).url
    except ValueError:
        return None


def _add_anchor(resource: Resource, name: str, schema: Schema) -> None:
    if resource.anchors.setdefault(name, schema) is not schema:
        resource.ambiguous.add(name)
