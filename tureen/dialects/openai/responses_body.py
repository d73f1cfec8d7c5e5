"""The body of OpenAI's `/v1/responses`: from input items to a Chat."""

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
from tureen.requests.body import convert, refuse_unknown
from tureen.requests.chat import Chat
from tureen.requests.planning import Names
from tureen.requests.state import ServerState
from tureen.requests.thinking_field import effort_kwargs
from tureen.requests.tool_fields import MAX_TOOLS, check_tools, choose, custom_tool, read_tool_choice
from tureen.text.messages import MAX_MESSAGES, FreeInput, Tool, ToolChoice

TABLE = openai_fields.table_of("responses")
NOT_OFFERED = TABLE.refused


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
    """What the text must be. `strict`: what of a schema cannot be enforced is refused."""

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
        Meta(description="What was said so far: a text of the user's, or items; a message's type may be left out."),
    ]
    instructions: Annotated[str | None, Meta(description="What stands before the conversation.")] = None
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
    safety_identifier: Annotated[Label | None, Meta(description="Who it is for; the answer has it.")] = None


def parse(given: dict[str, Any]) -> ResponsesBody:
    """The body, its form checked. Raises InvalidRequest."""
    if isinstance(given.get("input"), list) and len(given["input"]) <= MAX_MESSAGES:
        given = given | {"input": read_items(given["input"])}
    body = openai_fields.read(given, ResponsesBody, NOT_OFFERED)
    if body.stream_options is not None and (
        body.stream_options.include_usage or body.stream_options.continuous_usage_stats
    ):
        raise InvalidRequest(
            "stream_options is not available: the last event always tells the usage; leave it out",
            field="stream_options",
        )
    return body


def chat_of(body: ResponsesBody, given: Mapping[str, Any], name: str, state: ServerState) -> Chat:
    """Raises InvalidRequest, NotFound."""
    fields, names = openai_fields.asked_of(given, body, "max_output_tokens")
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
    talk = conversation_of(body.input, body.instructions)
    return Chat(
        messages=tuple(talk.messages),
        field="input",
        pictures=tuple(talk.pictures),
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


def _schema(given: ResponsesTextFormat) -> tuple[str, dict[str, Any] | None]:
    """What to call it, and the schema that the text must match; None = it may be anything. Raises InvalidRequest."""
    field = "text.format.schema"
    if given.type != "json_schema":
        if given.schema is not None:
            raise InvalidRequest(f"{field} needs text.format.type json_schema", field=field)
        return "text.format", {"type": "object"} if given.type == "json_object" else None
    if given.schema is None:
        raise InvalidRequest(f"{field} is missing", field=field)
    return field, given.schema


def _template_kwargs(body: ResponsesBody, tools: Sequence[Tool], state: ServerState) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    return {} if effort is None else dict(effort_kwargs(effort, "reasoning.effort", tools, state.context))


def tools_of(body: ResponsesBody) -> tuple[Tool, ...]:
    """Raises InvalidRequest."""
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
    name: str


class AllowedCustomTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="custom"):
    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool | AllowedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


def _chosen(given: Any, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and whether one is. Raises InvalidRequest."""
    field, tools = "tool_choice", tuple(tools)
    if not isinstance(given, dict):
        return tools, read_tool_choice(given, tools, field)
    kinds: dict[Any, type[AllowedTool | AllowedCustomTool | AllowedTools]] = {
        "function": AllowedTool,
        "custom": AllowedCustomTool,
        "allowed_tools": AllowedTools,
    }
    named = given.get("type")
    kind = kinds.get(named) if isinstance(named, str) else None
    if kind is None:
        raise InvalidRequest(
            f"{field}.type must be function, custom or allowed_tools, got {echo(named)}", field=f"{field}.type"
        )
    refuse_unknown(given, ("type", *kind.__struct_fields__), field)
    choice = convert(given, kind, lambda name: f"{field}.{name}")
    if isinstance(choice, AllowedTool | AllowedCustomTool):
        return tools, choose(ToolChoice("required", choice.name), tools, field, f"{field}.name")
    for index, one in enumerate(choice.tools):
        choose(ToolChoice("required", one.name), tools, field, f"{field}.tools[{index}].name")
    names = {one.name for one in choice.tools}
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(choice.mode)
