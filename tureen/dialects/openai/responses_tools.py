"""Reads the tools and the tool choice of OpenAI's `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses/create (tools, tool_choice).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.errors import InvalidRequest, echo
from tureen.fields import ignored
from tureen.fields.body import convert
from tureen.fields.rules import TELLS_UNKNOWN
from tureen.fields.tools import MAX_NAME_CHARS, MAX_TOOLS, check_tools, choose, custom_tool, read_tool_choice
from tureen.text.messages import FreeInput, Tool, ToolChoice


class ResponsesToolFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `format` of a custom tool, which say what its input is."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Meta(min_length=1)] | None = None


Kind = Literal[
    "function", "custom", "namespace",
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "image_generation", "mcp", "computer", "computer_use_preview", "tool_search",
    "programmatic_tool_calling", "local_shell", "shell", "apply_patch",
]  # fmt: skip
OWN = ("function", "custom", "namespace")
"""Types of tools that the client runs. Tools of the other types are left out, and told."""
FOREIGN = frozenset(get_args(Kind)) - frozenset(OWN)
TAUGHT = ("tool_search", "programmatic_tool_calling", "local_shell", "shell", "apply_patch")
"""Types of tools that clients run, and that only OpenAI's models were taught to call."""
FIELDS_OF = {"function": ("parameters", "strict"), "custom": ("format",), "namespace": ("tools",)}
"""Type of a tool -> the fields that only it has."""


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the client runs, a custom tool, which takes a text, a namespace of such tools, or a tool that
    only another server runs."""

    type: Kind
    name: str | None = None
    format: ResponsesToolFormat | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None
    tools: Annotated[
        Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="With type namespace: its functions and custom tools."),
    ] = None


class SentTool(NamedTuple):
    """A tool as its client sent it, and where."""

    path: str  # in the body, for errors: `tools[0].tools[1]`
    tool: ResponsesTool
    namespace: ResponsesTool | None = None

    @property
    def name(self) -> str:
        """Returns the name that the model reads and calls."""
        name = self.tool.name or ""
        return name if self.namespace is None else joined_name(self.namespace.name or "", name)


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the name of a namespace's tool as the model reads it; the tool's own where both together are too long."""
    if not namespace:
        return name
    joined = f"{namespace}{name}" if namespace.endswith(("_", "-", ".")) else f"{namespace}__{name}"
    return joined if len(joined) <= MAX_NAME_CHARS else name


def read_tool_types(tools: Any) -> Any:
    """Returns the field `tools` without what describes tools that only other servers run: it is left out with them."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        return tools
    return [
        {"type": tool["type"]} if isinstance(tool, dict) and _is_foreign(tool.get("type")) else tool for tool in tools
    ]


def _is_foreign(kind: Any) -> bool:
    return isinstance(kind, str) and kind in FOREIGN


def sent_tools(tools: Sequence[ResponsesTool] | None) -> list[SentTool]:
    """Returns the tools that the client runs, those of namespaces one by one. Raises InvalidRequest."""
    sent = []
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        if tool.type not in OWN:
            continue
        _check_fields(tool, path)
        if tool.type != "namespace":
            sent.append(SentTool(path, tool))
            continue
        for number, inner in enumerate(tool.tools or ()):
            place = f"{path}.tools[{number}]"
            if inner.type not in ("function", "custom"):
                raise InvalidRequest(
                    f"{place}.type must be function or custom, got {echo(inner.type)}", field=f"{place}.type"
                )
            _check_fields(inner, place)
            sent.append(SentTool(place, inner, tool))
    return sent


def _check_fields(tool: ResponsesTool, path: str) -> None:
    if tool.name is None:
        raise InvalidRequest(f"{path}.name is missing", field=f"{path}.name")
    for kind, names in FIELDS_OF.items():
        for name in names:
            if kind != tool.type and getattr(tool, name) is not None:
                raise InvalidRequest(f"{path}.{name} cannot go with {path}.type {tool.type}", field=f"{path}.{name}")


def tools_of(tools: Sequence[ResponsesTool] | None) -> tuple[Tool, ...]:
    """Converts and checks the tools that the client runs, and tells the others. Raises InvalidRequest."""
    for index, tool in enumerate(tools or ()):
        if tool.type not in OWN:
            why = "only OpenAI's models are trained for it" if tool.type in TAUGHT else "only another server runs it"
            ignored.tell(f"tools[{index}]", f"{tool.type}: {why}; send a function")
    sent = sent_tools(tools)
    try:
        return check_tools([_tool(each) for each in sent], "tools")
    except InvalidRequest as error:
        raise _in_its_place(error, sent) from None


def _in_its_place(error: InvalidRequest, sent: Sequence[SentTool]) -> InvalidRequest:
    """Returns an error about one of the client's tools with the place where that was sent."""
    for index, each in enumerate(sent):
        place = f"tools[{index}]."
        if (error.field or "").startswith(place):
            message, field = (text.replace(place, f"{each.path}.", 1) for text in (error.message, error.field or ""))
            return InvalidRequest(message, field=field, code=error.code)
    return error


def namespaces_of(tools: Sequence[ResponsesTool] | None) -> dict[str, tuple[str, str]]:
    """Returns, for each tool of a namespace, the name that the model calls -> its namespace, its own name."""
    return {
        each.name: (each.namespace.name or "", each.tool.name or "")
        for each in sent_tools(tools)
        if each.namespace is not None
    }


def _tool(sent: SentTool) -> Tool:
    tool, about = sent.tool, sent.tool.description or ""
    if sent.namespace is not None and sent.namespace.description:
        about = f"{sent.namespace.description}\n\n{about}".strip()
    if tool.type == "custom":
        return custom_tool(sent.name, about, _free_input(tool.format, f"{sent.path}.format"))
    return Tool(name=sent.name, description=about, parameters=tool.parameters or {}, strict=bool(tool.strict))


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
    tools: Annotated[list[AllowedTool | AllowedCustomTool], Meta(max_length=MAX_TOOLS)]


def chosen_tools(
    tool_choice: Any, tools: Sequence[Tool], namespaces: Mapping[str, tuple[str, str]]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Returns the tools that tool_choice allows, and the choice among them. `namespaces`: as `namespaces_of` has them;
    a choice may name such a tool by its own name. Raises InvalidRequest."""
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
        why = "only another server runs this tool; " if _is_foreign(kind_name) else ""
        raise InvalidRequest(
            f"{field}.type: {why}it must be function, custom or allowed_tools, got {echo(kind_name)}",
            field=f"{field}.type",
        )
    if kind is AllowedTools:
        tool_choice = tool_choice | {"tools": _without_foreign(tool_choice.get("tools"), f"{field}.tools")}
    choice = convert(tool_choice, kind, lambda name: f"{field}.{name}", TELLS_UNKNOWN)
    called = {own: name for name, (_, own) in namespaces.items()} | {tool.name: tool.name for tool in tools}
    if isinstance(choice, AllowedTool | AllowedCustomTool):
        name = called.get(choice.name, choice.name)
        return tools, choose(ToolChoice("required", name), tools, field, f"{field}.name")
    allowed = [called.get(each.name, each.name) for each in choice.tools]
    for index, name in enumerate(allowed):
        choose(ToolChoice("required", name), tools, field, f"{field}.tools[{index}].name")
    left = tuple(tool for tool in tools if tool.name in allowed)
    return left, choose(ToolChoice(choice.mode), left, field)


def _without_foreign(allowed: Any, field: str) -> Any:
    """Returns the allowed tools without those that only other servers run, which are told."""
    if not isinstance(allowed, list) or len(allowed) > MAX_TOOLS:
        return allowed
    kept = []
    for index, tool in enumerate(allowed):
        if isinstance(tool, dict) and _is_foreign(tool.get("type")):
            ignored.tell(f"{field}[{index}]", "only another server runs this tool")
        else:
            kept.append(tool)
    return kept
