"""Declares the fields with which clients of vLLM and TGI constrain an output, and reads the constraints in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tureen.contract.params import MAX_CHOICES, VLLM_CONSTRAINTS, JsonObject
from tureen.errors import InvalidRequest, echo
from tureen.grammar.base import MAX_GRAMMAR_BYTES

MAX_SCHEMA_DEPTH = 200
KINDS = (*VLLM_CONSTRAINTS, "json_object")
JSON = VLLM_CONSTRAINTS["json"]
GUIDED = {f"guided_{kind}": parameter for kind, parameter in VLLM_CONSTRAINTS.items()}
"""The older names of vLLM's constraints -> our parameters."""

SPACE = re.compile(r"(?: |\\s|\[(?=[^\]]* |[^\]]*\\s)(?:[ \t\n\r]|\\[nrts])+\])(?:\*|\?|\{0?,[1-9][0-9]*\}|\{0,\})")
"""Matches the white-space patterns that allow no space and one space, which are all that the server's JSON has."""

SUBSCHEMA = (
    "additionalItems", "additionalProperties", "contains", "else", "items", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
SUBSCHEMA_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SUBSCHEMA_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
"""The keywords whose values are schemas that a part of the output must match."""

Pattern = Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
GuidedJson = Annotated[str | JsonObject | None, Meta(description="The older name of structured_outputs.json.")]
GuidedRegex = Annotated[Pattern | None, Meta(description="The older name of structured_outputs.regex.")]
GuidedChoice = Annotated[
    Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_CHOICES)] | None,
    Meta(description="The older name of structured_outputs.choice."),
]
GuidedGrammar = Annotated[Pattern | None, Meta(description="The older name of structured_outputs.grammar.")]
GuidedTag = Annotated[str | JsonObject | None, Meta(description="The older name of structured_outputs.structural_tag.")]
GuidedBackend = Annotated[
    Annotated[str, Meta(pattern=r"^(auto|guidance|lm-format-enforcer|outlines|xgrammar)(:[a-z,-]*)?$")] | None,
    Meta(description="One of vLLM's backends; accepted, and the server's own grammar engine is used."),
]
GuidedSpace = Annotated[
    Annotated[str, Meta(max_length=1024)] | None,
    Meta(description="White space in JSON: a pattern that allows no space and one space, as this server writes it."),
]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `structured_outputs`: one constraint, and how JSON is written."""

    json: Annotated[str | JsonObject | None, Meta(description="JSON schema, an object or its text.")] = None
    regex: Annotated[str | None, Meta(description="Pattern that the whole output matches.")] = None
    choice: Annotated[
        Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None, Meta(description="The output is one of these.")
    ] = None
    grammar: Annotated[str | None, Meta(description="Grammar that the output is derived from.")] = None
    structural_tag: Annotated[str | JsonObject | None, Meta(description="Free text with constrained parts.")] = None
    json_object: Annotated[bool | None, Meta(description="true: the output is a JSON object.")] = None
    disable_any_whitespace: Annotated[
        bool | None, Meta(description="Has no effect: JSON is written as json.dumps writes it.")
    ] = None
    disable_fallback: Annotated[bool | None, Meta(description="Accepted: this server has no fallback.")] = None
    whitespace_pattern: GuidedSpace = None
    disable_additional_properties: Annotated[
        bool | None, Meta(description="true: objects have only the keys that json names.")
    ] = None


class RequestedConstraint(NamedTuple):
    """A constraint of a body: our parameter, the client's field, and the value."""

    parameter: str
    field: str
    value: Any


def structured_constraints(outputs: StructuredOutputs) -> Iterator[RequestedConstraint]:
    """Yields the constraints in `structured_outputs`; the caller refuses more than one. Raises InvalidRequest."""
    where = "structured_outputs"
    if not outputs.json_object and all(getattr(outputs, kind) is None for kind in KINDS[:-1]):
        raise InvalidRequest(f"{where} is empty; it has one of {', '.join(KINDS)}", field=where)
    is_json = outputs.json is not None or bool(outputs.json_object)
    if outputs.whitespace_pattern is not None:
        check_space(outputs.whitespace_pattern, f"{where}.whitespace_pattern", is_json=is_json)
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(outputs, name) and not is_json:
            raise InvalidRequest(f"{where}.{name} needs {where}.json", field=f"{where}.{name}")
    if outputs.json_object:
        yield RequestedConstraint(JSON, f"{where}.json_object", {"type": "object"})
    for kind, parameter in VLLM_CONSTRAINTS.items():
        value = getattr(outputs, kind)
        if value is not None:
            is_closed = kind == "json" and outputs.disable_additional_properties
            yield RequestedConstraint(parameter, f"{where}.{kind}", closed(value) if is_closed else value)


def add_constraints(
    constraints: Iterable[RequestedConstraint],
    fields: dict[str, Any],
    renamed: dict[str, str],
    guided_space: str | None,
) -> None:
    """Adds constraints to the parameters that a body sets, and their fields to the body's names of parameters.

    `guided_space`: the field guided_whitespace_pattern. Raises InvalidRequest for a parameter that is set already.
    """
    for parameter, field, value in constraints:
        if parameter in fields:
            raise InvalidRequest(f"{field} cannot go with {renamed[parameter]}; send one", field=field)
        fields[parameter], renamed[parameter] = value, field
    if guided_space is not None:
        check_space(guided_space, "guided_whitespace_pattern", is_json=JSON in fields)


def check_space(pattern: str, field: str, *, is_json: bool) -> None:
    """Raises InvalidRequest for white space that the server's JSON never has, and if the output is not JSON."""
    if not is_json:
        raise InvalidRequest(f"{field} applies only to JSON outputs; leave it out", field=field)
    if not SPACE.fullmatch(pattern):
        raise InvalidRequest(
            f"{field} must allow no and one space, such as '[ ]?' or '[\\n ]*', got {echo(pattern)}: JSON is written "
            'as {"a": 1, "b": [2, 3]}; leave it out',
            field=field,
        )


def named_schema(value: str | Mapping[str, Any]) -> Any:
    """Returns the schema in TGI's form `{"name": …, "schema": …}`; any other value is a schema itself."""
    is_named = not isinstance(value, str) and "schema" in value and value.keys() <= {"name", "schema"}
    return value["schema"] if is_named and not isinstance(value, str) else value


def closed(schema: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """Returns the schema with "additionalProperties": false in each subschema that names keys and does not have it.

    Leaves text that is not JSON unchanged: compiling it raises the error. Raises InvalidRequest for a schema that is
    nested too deeply.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return schema
        return msgspec.json.encode(_closed(schema, MAX_SCHEMA_DEPTH)).decode()
    changed: Mapping[str, Any] = _closed(schema, MAX_SCHEMA_DEPTH)
    return changed


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    if not depth:
        field = "structured_outputs.disable_additional_properties"
        raise InvalidRequest(f"{field}: the schema is nested deeper than {MAX_SCHEMA_DEPTH}; leave it out", field=field)
    changed = dict(schema)
    for name, value in schema.items():
        if name in SUBSCHEMA_MAPS and isinstance(value, dict):
            changed[name] = {key: _closed(part, depth - 1) for key, part in value.items()}
        elif name in SUBSCHEMA_LISTS and isinstance(value, list):
            changed[name] = [_closed(part, depth - 1) for part in value]
        elif name in SUBSCHEMA:
            changed[name] = _closed(value, depth - 1)
    if "properties" in schema or "patternProperties" in schema:
        changed.setdefault("additionalProperties", False)
    return changed
