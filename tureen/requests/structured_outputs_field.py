"""The field `structured_outputs`: what the output must be, as vLLM writes it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tureen.contract.params import MAX_CHOICES, JsonObject


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `structured_outputs`, of which one is sent."""

    json: Annotated[str | JsonObject | None, Meta(description="JSON schema, an object or its text.")] = None
    regex: Annotated[str | None, Meta(description="Pattern that the whole output matches.")] = None
    choice: Annotated[
        Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None, Meta(description="The output is one of these.")
    ] = None
    grammar: Annotated[str | None, Meta(description="Grammar (GBNF) that the output is derived from.")] = None
    structural_tag: Annotated[str | JsonObject | None, Meta(description="Free text with constrained parts.")] = None
    json_object: Annotated[bool | None, Meta(description="true: the output is a JSON object.")] = None
