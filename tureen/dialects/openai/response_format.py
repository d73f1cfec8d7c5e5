"""The field `response_format`: what the output must be, as OpenAI writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import MAX_KEYS, JsonObject
from tureen.errors import InvalidRequest

Entry = TypeVar("Entry")

TagList = Annotated[list[Entry], Meta(max_length=MAX_KEYS)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format.json_schema`."""

    name: Annotated[str | None, Meta(description="A name for it, for you.")] = None
    description: Annotated[str | None, Meta(description="What it is for, for you.")] = None
    schema: Annotated[JsonObject | None, Meta(description="The schema.")] = None
    strict: Annotated[bool | None, Meta(description="The schema is kept in any case.")] = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, Meta(description="With type json_schema.")] = None
    triggers: Annotated[TagList[str] | None, Meta(description="With type structural_tag, its older form.")] = None
    structures: Annotated[TagList[JsonObject] | None, Meta(description="With type structural_tag, its older form.")] = (
        None
    )
    format: Annotated[JsonObject | None, Meta(description="With type structural_tag.")] = None


def formatted(given: ResponseFormat) -> Iterator[tuple[str, str, Any]]:
    where = "response_format"
    tag = {"triggers": given.triggers, "structures": given.structures, "format": given.format}
    tag = {name: value for name, value in tag.items() if value is not None}
    if given.type != "structural_tag" and tag:
        name = next(iter(tag))
        raise InvalidRequest(f"{where}.{name} needs {where}.type structural_tag", field=f"{where}.{name}")
    if given.type != "json_schema" and given.json_schema is not None:
        raise InvalidRequest(f"{where}.json_schema needs {where}.type json_schema", field=f"{where}.json_schema")
    match given.type:
        case "json_object":
            yield "json_schema", where, {"type": "object"}
        case "json_schema":
            schema = None if given.json_schema is None else given.json_schema.schema
            if schema is None:
                field = f"{where}.json_schema" + ("" if given.json_schema is None else ".schema")
                raise InvalidRequest(f"{field} is missing", field=field)
            yield "json_schema", f"{where}.json_schema.schema", schema
        case "structural_tag":
            yield "structural_tag", where, {"type": given.type, **tag}
