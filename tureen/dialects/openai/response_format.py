"""The field `response_format`: what the output must be, as OpenAI, llama.cpp and TGI write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import MAX_KEYS, JsonObject
from tureen.errors import InvalidRequest
from tureen.requests.constraint_fields import JSON, SaidConstraint, named_schema

Entry = TypeVar("Entry")

TagList = Annotated[list[Entry], Meta(max_length=MAX_KEYS)]

WHERE = "response_format"
BELONGS = {
    "json_schema": ("json_schema",),
    "schema": ("json_object", "json_schema"),
    "value": ("json", "json_schema", "regex"),
    "triggers": ("structural_tag",),
    "structures": ("structural_tag",),
    "format": ("structural_tag",),
}
"""The types that a field belongs to."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format.json_schema`."""

    name: Annotated[str | None, Meta(description="A name for it, for you.")] = None
    description: Annotated[str | None, Meta(description="What it is for, for you.")] = None
    schema: Annotated[JsonObject | None, Meta(description="The schema.")] = None
    strict: Annotated[bool | None, Meta(description="true: what cannot be enforced is refused.")] = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, Meta(description="With type json_schema.")] = None
    schema: Annotated[
        JsonObject | None, Meta(description="With type json_object or json_schema, as llama.cpp has it: the schema.")
    ] = None
    value: Annotated[
        str | JsonObject | None,
        Meta(description="With type json, json_schema or regex, as TGI has it: the schema, or the pattern."),
    ] = None
    triggers: Annotated[TagList[str] | None, Meta(description="With type structural_tag, its older form.")] = None
    structures: Annotated[TagList[JsonObject] | None, Meta(description="With type structural_tag, its older form.")] = (
        None
    )
    format: Annotated[JsonObject | None, Meta(description="With type structural_tag.")] = None


def formatted(asked: ResponseFormat) -> Iterator[SaidConstraint]:
    """Yields what the output must be, and whether all of that must be enforced. Raises InvalidRequest."""
    sent = [name for name in BELONGS if getattr(asked, name) is not None]
    for name in sent:
        if asked.type not in BELONGS[name]:
            kinds = " or ".join(BELONGS[name])
            raise InvalidRequest(f"{WHERE}.{name} needs {WHERE}.type {kinds}", field=f"{WHERE}.{name}")
    if asked.type == "structural_tag":
        yield SaidConstraint(asked.type, WHERE, {"type": asked.type} | {name: getattr(asked, name) for name in sent})
    elif len(sent) > 1:
        field = f"{WHERE}.{sent[1]}"
        raise InvalidRequest(f"{field} cannot go with {WHERE}.{sent[0]}; send one", field=field)
    elif sent:
        yield _said(asked, sent[0])
    elif asked.type == "json_object":
        yield SaidConstraint(JSON, WHERE, {"type": "object"})
    elif asked.type != "text":
        field = f"{WHERE}.{asked.type if asked.type == JSON else 'value'}"
        raise InvalidRequest(f"{field} is missing", field=field)
    if asked.json_schema is not None and asked.json_schema.strict is not None:
        yield SaidConstraint("strict_schema", f"{WHERE}.{JSON}.strict", asked.json_schema.strict)


def _said(asked: ResponseFormat, name: str) -> SaidConstraint:
    """The schema or the pattern in the field `name`."""
    field, value = f"{WHERE}.{name}", getattr(asked, name)
    if isinstance(value, JsonSchemaFormat):
        field, value = f"{field}.schema", value.schema
    if value is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    if asked.type == "regex":
        if not isinstance(value, str):
            raise InvalidRequest(f"{field} must be a string with type regex", field=field)
        return SaidConstraint("regex", field, value)
    if name == "value" and asked.type == "json_schema":
        value = named_schema(value)
    return SaidConstraint(JSON, field, value)
