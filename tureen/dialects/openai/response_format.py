"""Declares the field `response_format`, as OpenAI, llama.cpp and TGI have it, and reads the constraint in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import MAX_KEYS, JsonObject
from tureen.errors import InvalidRequest
from tureen.fields.constraints import RequestedConstraint, named_schema

Entry = TypeVar("Entry")

TagList = Annotated[list[Entry], Meta(max_length=MAX_KEYS)]

WHERE = "response_format"
TYPES_OF_FIELD = {
    "json_schema": ("json_schema",),
    "schema": ("json_object", "json_schema"),
    "value": ("json", "json_object", "json_schema", "regex"),
    "triggers": ("structural_tag",),
    "structures": ("structural_tag",),
    "format": ("structural_tag",),
}
"""Field of response_format -> the types that it belongs to."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format.json_schema`."""

    name: Annotated[str | None, Meta(description="A name; the server does not use it.")] = None
    description: Annotated[str | None, Meta(description="A description; the server does not use it.")] = None
    schema: Annotated[JsonObject | None, Meta(description="The schema.")] = None
    strict: Annotated[bool | None, Meta(description="true: refuse a schema that cannot be enforced completely.")] = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, Meta(description="With type json_schema.")] = None
    schema: Annotated[
        JsonObject | None, Meta(description="With type json_object or json_schema, as llama.cpp has it: the schema.")
    ] = None
    value: Annotated[
        str | JsonObject | None,
        Meta(description="With type json, json_object, json_schema, regex, as TGI has it: the schema or the pattern."),
    ] = None
    triggers: Annotated[TagList[str] | None, Meta(description="With type structural_tag, its older form.")] = None
    structures: Annotated[TagList[JsonObject] | None, Meta(description="With type structural_tag, its older form.")] = (
        None
    )
    format: Annotated[JsonObject | None, Meta(description="With type structural_tag.")] = None


def format_constraints(form: ResponseFormat) -> Iterator[RequestedConstraint]:
    """Yields the constraint that response_format asks for, and how strict it is. Raises InvalidRequest."""
    constraint = _constraint(form)
    if constraint is not None:
        yield constraint
    if form.json_schema is not None and form.json_schema.strict is not None:
        yield RequestedConstraint("strict_schema", f"{WHERE}.json_schema.strict", form.json_schema.strict)


def _constraint(form: ResponseFormat) -> RequestedConstraint | None:
    sent = [name for name in TYPES_OF_FIELD if getattr(form, name) is not None]
    for name in sent:
        if form.type not in TYPES_OF_FIELD[name]:
            kinds = " or ".join(TYPES_OF_FIELD[name])
            raise InvalidRequest(f"{WHERE}.{name} needs {WHERE}.type {kinds}", field=f"{WHERE}.{name}")
    if form.type == "text":
        return None
    if form.type == "structural_tag":
        return RequestedConstraint(
            "structural_tag", WHERE, {"type": form.type} | {name: getattr(form, name) for name in sent}
        )
    if len(sent) > 1:
        raise InvalidRequest(
            f"{WHERE}.{sent[1]} cannot go with {WHERE}.{sent[0]}; send one", field=f"{WHERE}.{sent[1]}"
        )
    if not sent:
        if form.type == "json_object":
            return RequestedConstraint("json_schema", WHERE, {"type": "object"})
        field = f"{WHERE}.json_schema" if form.type == "json_schema" else f"{WHERE}.value"
        raise InvalidRequest(f"{field} is missing", field=field)
    return _field_constraint(form, sent[0])


def _field_constraint(form: ResponseFormat, name: str) -> RequestedConstraint:
    """Returns the constraint in the field `name`, a schema or a pattern. Raises InvalidRequest."""
    field, value = f"{WHERE}.{name}", getattr(form, name)
    if isinstance(value, JsonSchemaFormat):
        field, value = f"{field}.schema", value.schema
    if value is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    if form.type == "regex":
        if not isinstance(value, str):
            raise InvalidRequest(f"{field} must be a string with type regex", field=field)
        return RequestedConstraint("regex", field, value)
    if name == "value" and form.type == "json_schema":
        value = named_schema(value)
    return RequestedConstraint("json_schema", field, value)
