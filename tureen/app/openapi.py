"""Serves the OpenAPI document, made from the routes and the structs of their bodies, and the page that shows it.

Source: OpenAPI Specification 3.1, https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tureen.app.compat import compat_routes
from tureen.app.page import asset, compressed, page
from tureen.contract.params import ALIASES, GROUP, SamplingParams, Stops
from tureen.http.dialect import Docs, Entry, dialects
from tureen.http.replay import MAX_KEY_CHARS
from tureen.requests.state import ServerState

Schema = dict[str, Any]
FieldTypes = Mapping[tuple[type[msgspec.Struct], str], Any]

ABOUT_FIELD = ("description", "default", GROUP)
REFERENCE = "#/components/schemas/{name}"
NAMED = re.compile(r'"#/components/schemas/(\w+)"')
OUR_FIELD_TYPES: FieldTypes = {
    (SamplingParams, "stop"): str | Stops,
    (SamplingParams, "stop_regex"): str | Stops,
}
"""The types that OpenAPI shows for fields that accept fewer values than their declared types. Dialects add theirs
(`Dialect.field_types`)."""

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "What is wrong, and how to fix it."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field."},
                "code": {"type": "string"},
            },
        }
    },
}
ALWAYS = {400: "The request is wrong.", 500: "The request failed; other requests continue."}
WITH_KEY = {401: "The key is missing or wrong.", 403: "The key does not grant access to this route."}
WITH_ENGINE = {503: "Busy, shutting down, or the engine is dead; Retry-After says when to try again."}
WITH_NAME = {404: "No model, adapter, session or request has that name."}
WITH_BODY = WITH_NAME | {
    408: "The body did not arrive in time.",
    409: "In use.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The request is wrong (MindIE and TGI), or its Idempotency-Key belongs to another request.",
    424: "The model failed on this request (TGI), or the route is for another kind of model (TEI).",
    429: "This client has reached its limit of requests or tokens; Retry-After says when to try again.",
    504: "A deadline passed.",
}
IDEMPOTENCY_KEY: Schema = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A repeated request with the same key and body is not run again; the server repeats its answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+$"},
}
ABOUT = """\
A field takes effect, is refused with an error that names it, or is ignored and reported in the header x-tureen-ignored.
`null` is a field's default.
Keys are sent as `Authorization: Bearer KEY`; a server that was started without a key needs none.
"""


def all_field_types() -> dict[tuple[type[msgspec.Struct], str], Any]:
    """Returns (struct, field) -> the type to document, those above and the dialects'."""
    return {
        key: kind
        for table in (OUR_FIELD_TYPES, *(dialect.field_types for dialect in dialects()))
        for key, kind in table.items()
    }


def routes(_: ServerState) -> list[Entry]:
    """Returns the routes `/openapi.json` and `/docs`."""
    encoded, field_types = list[bytes](), all_field_types()

    async def openapi(request: Request) -> Response:
        if not encoded:
            encoded.append(msgspec.json.encode(document(request.app.routes, field_types)))
        return compressed(request, encoded[0], "application/json", {"vary": "accept-encoding"})

    async def docs(_: Request) -> Response:
        return page("docs", asset("docs.html"), script=asset("docs.js"))

    return [
        Entry("/openapi.json", openapi, access="open", docs=Docs("Server", "This document.")),
        Entry("/docs", docs, access="open", docs=Docs("Server", "The compatibility page.", answer="text/html")),
    ]


def document(routes: Iterable[BaseRoute], field_types: FieldTypes) -> Schema:
    """Makes the OpenAPI document of all routes that have documentation.

    `field_types`: (struct, field) -> the type to document instead of the declared one.
    """
    entries = [(route, route.docs) for route in routes if isinstance(route, Entry) and route.docs is not None]
    paths: dict[str, Schema] = {}
    for entry, docs in entries:
        operations = paths.setdefault(entry.path_format, {})
        methods = sorted((entry.methods or set()) - {"HEAD"})
        operations |= {method.lower(): _operation(entry, docs, method) for method in methods}
    bodies = {body for _, docs in entries for body in docs.bodies}
    errors = {docs.error.name: docs.error.schema for _, docs in entries if docs.error is not None}
    schemas: dict[str, Any] = _schemas(bodies, field_types) | {"Error": ERROR} | errors
    named = _named_from(NAMED.findall(json.dumps(paths)), schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tureen", "version": "1", "description": ABOUT},
        "servers": [{"url": "/"}],
        "tags": [{"name": api} for api in dict.fromkeys(docs.api for _, docs in entries)],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in schemas.items() if name in named},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key: --api-key."},
                "admin_key": {"type": "http", "scheme": "bearer", "description": "The admin key: --admin-api-key."},
            },
        },
    }


def _operation(entry: Entry, docs: Docs, method: str) -> Schema:
    name = entry.path_format.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "root"
    schemes: dict[str, list[Schema]] = {"open": [], "user": [{"key": []}], "admin": [{"admin_key": []}]}
    operation: Schema = {
        "operationId": f"{method.lower()}_{name}",
        "tags": [docs.api],
        "summary": docs.summary,
        "security": schemes[entry.access],
        "responses": _responses(entry, docs),
    }
    parameters = [
        {"name": path_name, "in": "path", "required": True, "schema": {"type": "string"}}
        for path_name in entry.param_convertors
    ] + [
        {"name": header, "in": "header", "description": meaning, "schema": {"type": "string"}}
        for header, meaning in docs.headers.items()
    ]
    if docs.query is not None:
        fields = _fields_of(docs.query)["properties"]
        parameters += [{"name": field, "in": "query", "schema": schema} for field, schema in fields.items()]
    if entry.is_limited and docs.bodies:
        parameters.append(IDEMPOTENCY_KEY)
    if parameters:
        operation["parameters"] = parameters
    if docs.bodies:
        references = [{"$ref": REFERENCE.format(name=_name(body))} for body in docs.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        content = {"schema": schema, "example": docs.example}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if docs.form is not None:
        content = {"schema": _fields_of(docs.form), "example": docs.example}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": content}}
    return operation


def _fields_of(struct: type[msgspec.Struct]) -> Schema:
    """Returns the JSON schema of a struct that contains no structs."""
    _, schemas = msgspec.json.schema_components([struct])
    schema: Schema = schemas[_name(struct)]
    return schema


def _responses(entry: Entry, docs: Docs) -> Schema:
    kinds = [kind for kind in (docs.answer, docs.other_answer, docs.stream) if kind is not None]
    statuses = ALWAYS | WITH_ENGINE | (WITH_KEY if entry.access != "open" else {})
    statuses |= WITH_BODY if docs.bodies or docs.form else (WITH_NAME if entry.param_convertors else {})
    statuses |= docs.statuses
    own = None if docs.error is None else docs.error.name
    shapes: list[Schema] = [{"$ref": REFERENCE.format(name=name)} for name in ("Error", own) if name is not None]
    error = {"application/json": {"schema": shapes[0] if own is None else {"anyOf": shapes}}}
    answer = {"description": "The answer.", "content": {kind: {} for kind in kinds}}
    failures = {str(status): {"description": why, "content": error} for status, why in sorted(statuses.items())}
    return {"200": answer} | failures


def _name(struct: type[msgspec.Struct]) -> str:
    return struct.__name__


def _schemas(bodies: Iterable[type[msgspec.Struct]], field_types: FieldTypes) -> dict[str, Schema]:
    """Returns the JSON schemas of bodies and of the structs in them, by the structs' names."""
    structs: set[type[msgspec.Struct]] = {*bodies, *(struct for struct, _ in field_types)}
    kinds = [*sorted(structs, key=_name), *field_types.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    for (struct, name), kind in field_types.items():
        [shown], _ = msgspec.json.schema_components([kind], ref_template=REFERENCE)
        for candidate in structs:
            if issubclass(candidate, struct):
                fields = schemas[_name(candidate)]["properties"]
                fields[name] = shown | {key: fields[name][key] for key in ABOUT_FIELD if key in fields[name]}
    own = schemas[SamplingParams.__name__]["properties"]
    for alias, name in ALIASES.items():
        own[alias] = own[name] | {"description": f"The same as {name}."}
        own[alias].pop(GROUP, None)
    for schema in schemas.values():
        first_paragraph = schema.get("description", "").partition("\n\n")[0]  # the rest is for developers
        schema["description"] = " ".join(first_paragraph.split())
        required = schema.get("required", ())
        for name, property_schema in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = _or_null(property_schema)
    _set_other_fields(schemas)
    return schemas


def _set_other_fields(schemas: dict[str, Schema]) -> None:
    """Sets which unknown fields each object may have: any if they are reported, else only null, which means "not
    sent"."""
    parts = [part for route in compat_routes() for part in route.parts]
    closed = {_name(part.struct) for part in parts if not part.table.tells_unknown}
    told = _named_from(
        (_name(part.struct) for part in parts if part.table.tells_unknown),
        {name: schema for name, schema in schemas.items() if name not in closed},
    )
    for name, schema in schemas.items():
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = True if name in told else {"type": "null"}


def _named_from(start: Iterable[str], schemas: Mapping[str, Schema]) -> set[str]:
    """Returns the names of the schemas that those in `start` name, directly or not, and theirs."""
    left, named = [*start], set[str]()
    while left:
        name = left.pop()
        if name not in named and name in schemas:
            named.add(name)
            left += NAMED.findall(json.dumps(schemas[name]))
    return named


def _or_null(schema: Schema) -> Schema:
    """Returns the schema of an optional field, which may also be null."""
    about = {key: schema[key] for key in ABOUT_FIELD if key in schema}
    kind = {key: value for key, value in schema.items() if key not in about}
    if not kind or {"type": "null"} in kind.get("anyOf", ()):
        return schema
    return {"anyOf": [*(kind["anyOf"] if list(kind) == ["anyOf"] else [kind]), {"type": "null"}]} | about
