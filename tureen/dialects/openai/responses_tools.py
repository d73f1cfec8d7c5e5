"""Reads the tools and the tool choice of OpenAI's `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses/create (tools, tool_choice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.errors import InvalidRequest, echo
from tureen.requests.body import convert
from tureen.requests.tool_fields import MAX_TOOLS, check_tools, choose, custom_tool, read_tool_choice
from tureen.requests.verdicts import TELLS_UNKNOWN
from tureen.text.messages import FreeInput, Tool, ToolChoice


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


def tools_of(sent_tools: Sequence[ResponsesTool]) -> tuple[Tool, ...]:
    """Converts and checks the body's tools. Raises InvalidRequest."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(sent_tools)]
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


def chosen_tools(tool_choice: Any, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice]:
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
    choice = convert(tool_choice, kind, lambda name: f"{field}.{name}", TELLS_UNKNOWN)
    if isinstance(choice, AllowedTool | AllowedCustomTool):
        return tools, choose(ToolChoice("required", choice.name), tools, field, f"{field}.name")
    for index, allowed in enumerate(choice.tools):
        choose(ToolChoice("required", allowed.name), tools, field, f"{field}.tools[{index}].name")
    names = {allowed.name for allowed in choice.tools}
    return tuple(tool for tool in tools if tool.name in names), ToolChoice(choice.mode)
