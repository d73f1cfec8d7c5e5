"""Serves SGLang's `/parse_function_call` and `/separate_reasoning`, which parse a text as the chat routes parse a
model's output."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tureen.errors import InvalidRequest, echo
from tureen.fields.body import convert, read_json, refuse_unknown
from tureen.fields.tools import MAX_TOOLS, ToolField, read_tools
from tureen.http.dialect import Docs, Entry
from tureen.requests.offload import offload
from tureen.requests.state import ServerState
from tureen.text import tools as tool_formats
from tureen.text.messages import CallArguments, CallStart, Content, Part, Reasoning, Tool
from tureen.text.reasoning import FORMATS, ReasoningFormat, ReasoningParser, find_reasoning_format
from tureen.text.tools import ToolFormat

MAX_CHARS = 1 << 20


class ParseFunctionCallBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's output, and the tools that it may call."""

    text: Annotated[str, Meta(max_length=MAX_CHARS, description="Output of a model.")]
    tools: Annotated[list[ToolField], Meta(max_length=MAX_TOOLS, description="Functions that the model may call.")]
    tool_call_parser: Annotated[
        str | None, Meta(description="Format of the calls, a name as for --tool-call-parser. Default: the server's.")
    ] = None


class SeparateReasoningBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's output, with its reasoning in it."""

    text: Annotated[str, Meta(max_length=MAX_CHARS, description="Output of a model.")]
    reasoning_parser: Annotated[
        str, Meta(description="Format of the reasoning, a name as for --reasoning-parser, such as deepseek-r1.")
    ]
    return_blocks: Annotated[bool, Meta(description="Not available: true is refused.")] = False


def routes(state: ServerState) -> list[Entry]:
    """Returns the routes."""

    async def parse_function_call(request: Request) -> Response:
        fields = await _read(request, ParseFunctionCallBody)
        tools = read_tools(fields.get("tools"))
        body = convert(fields | {"tools": []}, ParseFunctionCallBody)
        form = _tool_format(body.tool_call_parser, state)
        # the tools' schemas are read too, so that all of the body counts
        return JSONResponse(await offload.run(len(await request.body()), lambda: _calls(body.text, form, tools)))

    async def separate_reasoning(request: Request) -> Response:
        body = convert(await _read(request, SeparateReasoningBody), SeparateReasoningBody)
        if body.return_blocks:
            raise InvalidRequest("return_blocks: true is not available; leave it out", field="return_blocks")
        form = _reasoning_format(body.reasoning_parser)
        return JSONResponse(await offload.run(len(body.text), lambda: _separated(body.text, form)))

    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    return [
        Entry(
            "/parse_function_call",
            parse_function_call,
            access="user",
            methods=["POST"],
            any_model=True,
            docs=Docs(
                "SGLang",
                "Find the tool calls in a text.",
                bodies=(ParseFunctionCallBody,),
                example={"text": call, "tools": [tool], "tool_call_parser": "hermes"},
            ),
        ),
        Entry(
            "/separate_reasoning",
            separate_reasoning,
            access="user",
            methods=["POST"],
            any_model=True,
            docs=Docs(
                "SGLang",
                "Find the reasoning in a text.",
                bodies=(SeparateReasoningBody,),
                example={"text": "<think>3 + 4 = 7</think>It is 7.", "reasoning_parser": "qwen3"},
            ),
        ),
    ]


async def _read(request: Request, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns the body's fields that are not null. Raises InvalidRequest for unknown and missing ones."""
    payload = read_json(request.headers.get("content-type"), await request.body())
    refuse_unknown(payload, kind.__struct_fields__)
    fields = {name: value for name, value in payload.items() if value is not None}
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in fields:
            raise InvalidRequest(f"{field.name} is missing; it must be sent", field=field.name)
    return fields


def _tool_format(name: str | None, state: ServerState) -> ToolFormat:
    if name is None:
        if state.context.tool_format is None:
            raise InvalidRequest(
                "tool_call_parser is missing, and the server runs with --tool-call-parser none; send one of "
                f"{', '.join(tool_formats.PARSERS)}",
                field="tool_call_parser",
            )
        return state.context.tool_format
    if name not in tool_formats.PARSERS:
        raise InvalidRequest(
            f"tool_call_parser must be one of {', '.join(tool_formats.PARSERS)}, got {echo(name)}",
            field="tool_call_parser",
        )
    return tool_formats.PARSERS[name]


def _reasoning_format(name: str) -> ReasoningFormat:
    reasoning_format = find_reasoning_format(name)
    if reasoning_format is None:
        raise InvalidRequest(
            f"reasoning_parser must be one of {', '.join(FORMATS)}, got {echo(name)}", field="reasoning_parser"
        )
    return reasoning_format


def _calls(text: str, form: ToolFormat, tools: tuple[Tool, ...]) -> dict[str, Any]:
    """Returns the tool calls in a text, and the text without them. `tool_index`: the function's index in `tools`."""
    parser = form.parser(tools)
    places = {tool.name: index for index, tool in enumerate(tools)}
    text_pieces: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for part in parser.feed(text) + parser.close():
        match part:
            case CallStart(_, name):
                calls.append((name, []))
            case CallArguments(index, piece):
                calls[index][1].append(piece)
            case Content(piece):
                text_pieces.append(piece)
    return {
        "normal_text": "".join(text_pieces),
        "calls": [{"tool_index": places[name], "name": name, "parameters": "".join(pieces)} for name, pieces in calls],
    }


def _separated(text: str, form: ReasoningFormat) -> dict[str, str]:
    parser = tool_formats.PARSERS[form.calls].parser(()) if form.calls else ReasoningParser(form)
    parts = parser.feed(text) + parser.close()
    return {"reasoning_text": _joined(parts, Reasoning), "text": _joined(parts, Content)}


def _joined(parts: list[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))
