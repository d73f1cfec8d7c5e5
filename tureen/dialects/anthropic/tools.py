"""Converts Anthropic's tools and tool choice, and settles what becomes of work that only Anthropic's servers do."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tureen.dialects.anthropic.body import SERVER_TOOLS, AnthropicBody, AnthropicCountBody, AnthropicTool
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.tools import check_tools, choose
from tureen.text.messages import Tool, ToolChoice

CLEAR_THINKING = "clear_thinking_20251015"
EDITS = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
"""Edits of a conversation -> the prompt's tokens from which each comes into effect, where the edit does not say it."""


class ClientTools(NamedTuple):
    """The tools that the client runs, and which of them are called."""

    tools: tuple[Tool, ...]
    places: tuple[int, ...]  # of each in the body's list
    choice: ToolChoice


def tools_of(body: AnthropicBody | AnthropicCountBody) -> ClientTools:
    """Reads tools, tool choice and `mcp_servers`. What only Anthropic's servers run is left out and told.

    Raises InvalidRequest, too where `tool_choice` demands what is left out.
    """
    sent = body.tools or []
    places = [index for index, tool in enumerate(sent) if not _is_of_server(tool)]
    tools = check_tools(
        [_tool(sent[index], f"tools[{index}]") for index in places], "tools", parameters="input_schema", places=places
    )
    left_out = [f"tools[{index}]" for index, tool in enumerate(sent) if _is_of_server(tool)]
    for path in (*left_out, *(["mcp_servers"] if body.mcp_servers else [])):
        ignored.tell(path, "only Anthropic's servers run it; send your own tool and run it in the client")
    return ClientTools(tools, tuple(places), _choice(body, tools))


def _is_of_server(tool: AnthropicTool) -> bool:
    return tool.type is not None and SERVER_TOOLS.fullmatch(tool.type) is not None


def _tool(tool: AnthropicTool, path: str) -> Tool:
    """Converts a tool of the client's. Raises InvalidRequest."""
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{path}.type {echo(tool.type)} is not supported: only Anthropic's models know its input; send a tool of "
            "type custom, with an input_schema",
            field=f"{path}.type",
        )
    if tool.input_schema is None:
        raise InvalidRequest(f"{path}.input_schema is missing", field=f"{path}.input_schema")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise InvalidRequest(
            f"{path}.allowed_callers must have direct: other callers run on Anthropic's servers",
            field=f"{path}.allowed_callers",
        )
    lines = [tool.description] if tool.description else []
    if tool.input_examples:
        lines += ["Examples of its input:", *(msgspec.json.encode(example).decode() for example in tool.input_examples)]
    return Tool(
        name=tool.name,
        description="\n".join(lines),
        parameters=tool.input_schema,
        strict=bool(tool.strict),
    )


def _choice(body: AnthropicBody | AnthropicCountBody, tools: tuple[Tool, ...]) -> ToolChoice:
    """Converts the body's tool choice and checks it against its tools. Raises InvalidRequest."""
    choice = body.tool_choice
    if choice is None:
        return choose(ToolChoice(), tools, "tool_choice")
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidRequest(
            f"tool_choice.name is for tool_choice.type tool only; got type {choice.type}",
            field="tool_choice.name",
        )
    if choice.name in [tool.name for tool in body.tools or () if _is_of_server(tool)]:
        raise InvalidRequest(
            f"tool_choice.name {echo(choice.name)} names a tool that only Anthropic's servers run; name one of your "
            "own",
            field="tool_choice.name",
        )
    mode = {"auto": "auto", "none": "none"}.get(choice.type, "required")
    return choose(ToolChoice(mode, choice.name), tools, "tool_choice", "tool_choice.name")  # type: ignore[arg-type]


def check_edits(body: AnthropicBody | AnthropicCountBody, capacity: int) -> None:
    """Tells edits of the conversation that never come into effect, in prompts of at most `capacity` tokens. Raises
    InvalidRequest for others: this server edits no conversation."""
    edits: list[dict[str, Any]] = [] if body.context_management is None else body.context_management.edits
    for index, edit in enumerate(edits):
        path, kind = f"context_management.edits[{index}]", edit.get("type")
        if kind == CLEAR_THINKING:
            ignored.tell(path, "the model's chat template says which earlier thoughts it reads")
            continue
        if not isinstance(kind, str) or kind not in EDITS:
            allowed = ", ".join((CLEAR_THINKING, *EDITS))
            raise InvalidRequest(f"{path}.type must be one of {allowed}; got {echo(kind)}", field=f"{path}.type")
        trigger = edit.get("trigger") or {"type": "input_tokens", "value": EDITS[kind]}
        tokens = trigger.get("value") if isinstance(trigger, dict) and trigger.get("type") == "input_tokens" else None
        if not isinstance(tokens, int) or tokens < capacity:
            raise InvalidRequest(
                f"{path} could take effect in prompts of up to {capacity} tokens, but this server does not edit "
                "conversations; leave it out, and send only what the model is to read",
                field=path,
            )
        ignored.tell(path, f"it takes effect from {tokens} tokens on, more than the context holds")
