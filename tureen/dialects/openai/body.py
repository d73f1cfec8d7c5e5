"""What the bodies of OpenAI's two main routes share: the sampling parameters by their own names and by OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import INT64_MAX, INT64_MIN, MAX_CHOICES, MAX_KEYS, JsonObject, SamplingParams
from tureen.contract.types import LogprobSpec
from tureen.errors import InvalidRequest
from tureen.log import get_logger
from tureen.requests.body import PARAM_FIELDS, TEXT_LISTS, convert, refuse_not_offered, refuse_unknown
from tureen.requests.model_field import adapter_of
from tureen.requests.planning import Names
from tureen.requests.processor_field import check_processor
from tureen.requests.shared_fields import (
    MAX_TOP_LOGPROBS,
    CacheSalt,
    Deadline,
    FirstTokenDeadline,
    LogMetrics,
    LogprobsModeField,
    Priority,
)
from tureen.requests.state import ServerState
from tureen.requests.verdicts import FieldTable, read_tables

T = TypeVar("T", bound="OpenAIBody")
Entry = TypeVar("Entry")

MAX_LABEL_CHARS = 512

TagList = Annotated[list[Entry], Meta(max_length=MAX_KEYS)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Tokens = Annotated[int, Meta(ge=0, le=INT64_MAX)]

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""OpenAI's and vLLM's names of sampling parameters."""

TABLES = read_tables(Path(__file__).with_name("fields.toml"))

log = get_logger("api")


def table_of(route: str) -> FieldTable:
    """The verdicts on the fields of a route that generates."""
    return TABLES["common"].joined(TABLES.get(route, FieldTable()))


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `stream_options`."""

    include_usage: Annotated[bool | None, Meta(description="The last chunk tells the usage, and has no choices.")] = (
        None
    )
    continuous_usage_stats: Annotated[bool | None, Meta(description="Every chunk tells the usage so far.")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Not available: true is refused.")] = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format.json_schema`."""

    name: Annotated[str | None, Meta(description="A name for it, for you.")] = None
    description: Annotated[str | None, Meta(description="What it is for, for you.")] = None
    schema: Annotated[JsonObject | None, Meta(description="The schema.")] = None
    strict: Annotated[bool | None, Meta(description="true: what cannot be enforced is refused.")] = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, Meta(description="With type json_schema.")] = None
    triggers: Annotated[TagList[str] | None, Meta(description="With type structural_tag, its older form.")] = None
    structures: Annotated[TagList[JsonObject] | None, Meta(description="With type structural_tag, its older form.")] = (
        None
    )
    format: Annotated[JsonObject | None, Meta(description="With type structural_tag.")] = None


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


class OpenAIBody(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes have: sampling parameters by their own names, and these."""

    model: Annotated[
        str | None,
        Meta(description="The served model, an adapter, or MODEL:ADAPTER; see /v1/models. Default: the served model."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None,
        Meta(description="Same request, same seed, same tokens. Default: random, reported."),
    ] = None
    min_tokens: Annotated[Tokens | None, Meta(description="Another name of min_new_tokens.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Another name of no_stop_trim.")] = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events.")] = False
    stream_options: Annotated[StreamOptions | None, Meta(description="What a stream tells; needs stream: true.")] = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description="What the output must be: text, JSON, or JSON of a schema.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="vLLM's way to say what the output must be.")
    ] = None
    logprobs_mode: LogprobsModeField = "processed"
    user: Annotated[Label | None, Meta(description="Who it is for; the log has it beside the id, at level debug.")] = (
        None
    )
    safety_identifier: Annotated[Label | None, Meta(description="The newer name of user.")] = None
    metadata: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)] | None,
        Meta(description="Notes of yours; the answer has them in its metadata."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, Meta(description="There is one; the answer names it where it was asked for.")
    ] = None
    prompt_cache_key: Annotated[
        Label | None,
        Meta(description="Requests with the same one find each other's prefixes: here all of one client do."),
    ] = None
    rid: Annotated[str | None, Meta(description="Id to abort the request by, and of the answer. Default: made up.")] = (
        None
    )
    request_id: Annotated[str | None, Meta(description="Another name of rid.")] = None
    lora_path: Annotated[
        str | None, Meta(description="Name of a loaded adapter, or the path it was loaded from; or put it in model.")
    ] = None
    custom_logit_processor: Annotated[
        str | None, Meta(description="A processor's name, or one sent as code; see the processors page.")
    ] = None
    log_metrics: LogMetrics = True
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    deadline_ms: Deadline = None
    ttft_deadline_ms: FirstTokenDeadline = None


class AskedSampling(NamedTuple):
    """What a body says of how to sample, by the names of SamplingParams, and what it calls these."""

    fields: dict[str, Any]
    names: Names


def read(given: Mapping[str, Any], kind: type[T], not_offered: Mapping[str, tuple[Any, str]]) -> T:
    """Check a body's form. Raises InvalidRequest."""
    refuse_unknown(given, (*kind.__struct_fields__, *not_offered))
    refuse_not_offered(given, not_offered)
    fields = {
        name: [value] if name in TEXT_LISTS and isinstance(value, str) else value
        for name, value in given.items()
        if value is not None and name not in not_offered
    }
    body = convert(fields, kind)
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", field="stream_options")
    if options is not None and options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{field} is not available: chunks are not padded; leave it out", field=field)
    if body.rid is not None and body.request_id is not None:
        raise InvalidRequest("request_id and rid are the same field; send one", field="request_id")
    return body


def asked_of(given: Mapping[str, Any], body: OpenAIBody, limit_name: str) -> AskedSampling:
    """How to sample. `limit_name`: what max_new_tokens is called where the body does not set it.

    Raises InvalidRequest.
    """
    fields: dict[str, Any] = {}
    renamed = {"max_new_tokens": limit_name}
    for name in given:
        target = ALIASES.get(name, name)
        is_set = given[name] is not None or name == "max_new_tokens"  # null there: up to the context end
        if target in PARAM_FIELDS and is_set:
            if target in fields:
                other = renamed.get(target, target)
                raise InvalidRequest(f"{name} and {other} are the same field; send one", field=name)
            fields[target], renamed[target] = (None if given[name] is None else getattr(body, name)), name
    for target, field, value in _constraints(body):
        if target in fields:
            raise InvalidRequest(f"{field} cannot go with {renamed[target]}; send one", field=field)
        fields[target], renamed[target] = value, field
    return AskedSampling(fields, Names("", renamed))


def _constraints(body: OpenAIBody) -> Iterator[tuple[str, str, Any]]:
    """(parameter, field, value) of what the output must be, as the body says it otherwise than by a parameter."""
    if body.response_format is not None:
        yield from _formatted(body.response_format)
    given = body.structured_outputs
    if given is None:
        return
    if given.json_object:
        yield "json_schema", "structured_outputs.json_object", {"type": "object"}
    values = {"json_schema": "json", "regex": "regex", "choice": "choice", "ebnf": "grammar", "structural_tag": None}
    found = [(target, name or target) for target, name in values.items()]
    for target, name in found:
        if getattr(given, name) is not None:
            yield target, f"structured_outputs.{name}", getattr(given, name)
    if not given.json_object and all(getattr(given, name) is None for _, name in found):
        raise InvalidRequest(
            "structured_outputs is empty; it has one of json, regex, choice, grammar, structural_tag, json_object",
            field="structured_outputs",
        )


def _formatted(given: ResponseFormat) -> Iterator[tuple[str, str, Any]]:
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
            if given.json_schema is not None and given.json_schema.strict is not None:
                yield "strict_schema", f"{where}.json_schema.strict", given.json_schema.strict
        case "structural_tag":
            yield "structural_tag", where, {"type": given.type, **tag}


def logprobs_of(body: OpenAIBody, top: int | None, *, prompt_too: bool = False) -> LogprobSpec | None:
    """`top`: best alternatives at each position, None = no log-probabilities. Raises InvalidRequest."""
    if top is not None:
        return LogprobSpec(0 if prompt_too else -1, top, (), body.logprobs_mode)
    if body.logprobs_mode != "processed":
        raise InvalidRequest("logprobs_mode needs logprobs", field="logprobs_mode")
    return None


def adapter(body: OpenAIBody, state: ServerState) -> str:
    """Name or path of the adapter that is asked for; "" = none. Raises NotFound, InvalidRequest."""
    named = adapter_of(body.model, state)
    if body.lora_path is None:
        return named
    state.check_adapter(body.lora_path, "lora_path")
    if named and body.lora_path not in (named, state.adapters[named]):
        raise InvalidRequest("lora_path and model name different adapters; send one", field="lora_path")
    return body.lora_path


def processor(body: OpenAIBody, state: ServerState) -> str:
    """Raises InvalidRequest."""
    given = body.custom_logit_processor
    return "" if given is None else check_processor(given, state.context.config, "custom_logit_processor")
