"""Declares the body of OpenAI's `/v1/responses` and converts it to a chat.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.dialects.openai import body as openai_fields
from tureen.dialects.openai.body import Label, OpenAIBody, Tokens
from tureen.dialects.openai.responses_input import ResponsesItem, conversation_of, read_items
from tureen.errors import InvalidRequest, echo
from tureen.requests import telling
from tureen.requests.body import convert
from tureen.requests.chat import Chat
from tureen.requests.planning import Names
from tureen.requests.state import ServerState
from tureen.requests.thinking_field import effort_kwargs
from tureen.requests.tool_fields import MAX_TOOLS, check_tools, choose, custom_tool, read_tool_choice
from tureen.text.messages import MAX_MESSAGES, FreeInput, Tool, ToolChoice

TABLE = openai_fields.table_of("responses")


class ResponsesToolFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `format` of a custom tool, which say what its input is."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Meta(min_length=1)] | None = None


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the client runs, or a custom tool, which takes a text."""

    type: Literal["function", "custom"]
    name: str
    format: ResponsesToolFormat | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class ResponsesTextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer's text. `strict`: what of a schema cannot be enforced is refused."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class ResponsesText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `text`."""

    format: ResponsesTextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesReasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesBody(OpenAIBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `POST /v1/responses`."""

    input: Annotated[
        str | Annotated[list[ResponsesItem], Meta(max_length=MAX_MESSAGES)],
        Meta(description="The conversation so far: a text of the user, or items; a message's type may be left out."),
    ]
    instructions: Annotated[str | None, Meta(description="System message.")] = None
    max_output_tokens: Annotated[
        Tokens | None, Meta(description="Most tokens to generate. Default: up to the context end.")
    ] = None
    tools: Annotated[
        Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="Functions and custom tools that the client runs."),
    ] = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | JsonObject | None,
        Meta(description="Whether tools are called: a mode, a function, or `allowed_tools`."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: one call at most.")] = True
    text: Annotated[ResponsesText | None, Meta(description="`format`: text, JSON, or JSON of a schema.")] = None
    reasoning: Annotated[
        ResponsesReasoning | None,
        Meta(description="`effort`: for chat templates that know it; none also turns enable_thinking off."),
    ] = None
    include: Annotated[
        Annotated[list[str], Meta(max_length=0)] | None, Meta(description="Everything there is, is in the answer.")
    ] = None
    safety_identifier: Annotated[Label | None, Meta(description="Name of the end user, returned in the answer.")] = None


def parse(payload: dict[str, Any]) -> ResponsesBody:
    """Checks a JSON body's form. Raises InvalidRequest."""
    if isinstance(payload.get("input"), list) and len(payload["input"]) <= MAX_MESSAGES:
        payload = payload | {"input": read_items(payload["input"])}
    body = openai_fields.read(payload, ResponsesBody, TABLE)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        telling.tell("stream_options.continuous_usage_stats", "the last event tells the usage")
    return body


def chat_of(body: ResponsesBody, payload: Mapping[str, Any], name: str, state: ServerState) -> Chat:
    """Converts a body to a chat. `payload`: the body as sent; `name`: the id of the answer. Raises InvalidRequest,
    NotFound."""
    fields, names = openai_fields.requested_sampling(payload, body, "max_output_tokens")
    if body.max_output_tokens is not None:
        fields["max_new_tokens"] = body.max_output_tokens
    if body.text is not None and body.text.format is not None:
        field, schema = _schema(body.text.format)
        if schema is not None:
            if "json_schema" in fields:
                raise InvalidRequest(f"{field} cannot go with {names.path('json_schema')}; send one", field=field)
            fields["json_schema"], strict = schema, body.text.format.strict
            names = Names("", {**names.renamed, "json_schema": field})
            if strict is not None and body.text.format.type == "json_schema":
                fields["strict_schema"] = strict
                names = Names("", {**names.renamed, "strict_schema": "text.format.strict"})
    tools = tools_of(body)
    tools, choice = _chosen(body.tool_choice, tools)
    conversation = conversation_of(body.input, body.instructions)
    return Chat(
        messages=tuple(conversation.messages),
        field="input",
        pictures=tuple(conversation.pictures),
        tools=tools,
        grammar_field="tools[{}].format.definition",
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=_template_kwargs(body, tools, state),
        sampling=fields,
        names=names,
        adapter=openai_fields.adapter(body, state),
        priority=body.priority,
        cache_salt=body.cache_salt,
        processor=openai_fields.processor(body, state),
        rid=name,
        deadline_ms=body.deadline_ms,
        ttft_deadline_ms=body.ttft_deadline_ms,
        log_metrics=body.log_metrics,
    )


def _schema(text_format: ResponsesTextFormat) -> tuple[str, dict[str, Any] | None]:
    """Returns the field that asks for a schema, and the schema that the text must match; None = any text. Raises
    InvalidRequest."""
    field = "text.format.schema"
    if text_format.type != "json_schema":
        if text_format.schema is not None:
            raise InvalidRequest(f"{field} needs text.format.type json_schema", field=field)
        return "text.format", {"type": "object"} if text_format.type == "json_object" else None
    if text_format.schema is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    return field, text_format.schema


def _template_kwargs(body: ResponsesBody, tools: Sequence[Tool], state: ServerState) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    return {} if effort is None else dict(effort_kwargs(effort, "reasoning.effort", tools, state.context))


def tools_of(body: ResponsesBody) -> tuple[Tool, ...]:
    """Converts and checks the body's tools. Raises InvalidRequest."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    return check_tools(tools, "tools")


def _tool(tool: ResponsesTool, path: str) -> Tool:
    others = ("format",) if tool.type == "function" else ("parameters", "strict")
    for name in others:
        if getattr(tool, name) is not None:
            raise InvalidRequest(f"{path}.{name} cannot go with {path}.type {tool.type}", field=f"{path}.{name}")
    if tool.type == "custom":
        return custom_tool(tool.name, tool.description or "", _free_input(tool.format, f"{path}.format"))
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=tool.parameters or {},
        strict=bool(tool.strict),
    )


def _free_input(kind: ResponsesToolFormat | None, path: str) -> FreeInput:
    if kind is None:
        return FreeInput()
    for name in ("syntax", "definition"):
        if (getattr(kind, name) is not None) is not (kind.type == "grammar"):
            problem = "is missing" if kind.type == "grammar" else f"needs {path}.type grammar"
            raise InvalidRequest(f"{path}.{name} {problem}", field=f"{path}.{name}")
    return FreeInput(syntax=kind.syntax or "text", definition=kind.definition or "")


class AllowedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="function"):
    """A function that may be called; as a tool choice, that must be called."""

    name: str


class AllowedCustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom"):
    """A custom tool that may be called; as a tool choice, that must be called."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="allowed_tools"):
    """A tool choice that allows some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool | AllowedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


def _chosen(tool_choice: Any, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Returns the tools that tool_choice allows, and the choice among them. Raises InvalidRequest."""
    field, tools = "tool_choice", tuple(tools)
    if not isinstance(tool_choice, dict):
        return tools, read_tool_choice(tool_choice, tools, field)
    kinds: dict[Any, type[AllowedTool | AllowedCustomTool | AllowedTools]] = {
        "function": AllowedTool,
        "custom": AllowedCustomTool,
        "allowed_tools": AllowedTools,
    }
    kind_name = tool_choice.get("type")
    kind = kinds.get(kind_name) if isinstance(kind_name, str) else None
    if kind is None:
        raise InvalidRequest(
            f"{field}.type must be function, custom or allowed_tools, got {echo(kind_name)}", field=f"{field}.type"
        )
    choice = convert(tool_choice, kind, lambda name: f"{field}.{name}" if name else field, TABLE)
    if isinstance(choice, AllowedTool | AllowedCustomTool):
        return tools, choose(ToolChoice("required", choice.name), tools, field, f"{field}.name")
    for index, allowed in enumerate(choice.tools):
        choose(ToolChoice("required", allowed.name), tools, field, f"{field}.tools[{index}].name")
    names = {allowed.name for allowed in choice.tools}
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(choice.mode)
