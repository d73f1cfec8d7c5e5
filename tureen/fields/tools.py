"""Reads and checks tools and tool_choice in OpenAI's form, for every API that has them.

Source: https://platform.openai.com/docs/api-reference/chat/create (tools, tool_choice).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tureen.contract.params import JsonObject
from tureen.errors import InvalidRequest, echo
from tureen.fields.body import convert
from tureen.fields.rules import TELLS_UNKNOWN
from tureen.text.messages import FreeInput, Tool, ToolChoice

T = TypeVar("T")

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
NAME = re.compile(f"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")
CHOICES = ("auto", "none", "required")

Tools = Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)]
"""Type of a body's field `tools`: objects, which `read_tools` reads as ToolField after it has dropped nulls."""


class FunctionField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that a tool describes."""

    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$", description="Its name; names of tools are unique.")]
    description: Annotated[str, Meta(description="What it does and when to call it; the model reads it.")] = ""
    parameters: Annotated[JsonObject, Meta(description="JSON schema of its arguments, an object.")] = {}
    strict: Annotated[bool, Meta(description="Arguments are always valid against the schema.")] = False


class CustomGrammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, description="The grammar, or the pattern that the input matches.")]


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `format`, which define a custom tool's input."""

    type: Literal["text", "grammar"]
    grammar: Annotated[CustomGrammar | None, Meta(description="With type grammar.")] = None


class CustomField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a tool of type custom, whose input is a text."""

    name: Annotated[str, Meta(pattern=f"^{NAME.pattern}$", description="Its name; names of tools are unique.")]
    description: Annotated[str, Meta(description="What it does and when to call it; the model reads it.")] = ""
    format: Annotated[CustomFormat | None, Meta(description="Form of its input. Default: any text.")] = None


class ToolField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    type: Literal["function", "custom"]
    function: Annotated[FunctionField | None, Meta(description="With type function.")] = None
    custom: Annotated[CustomField | None, Meta(description="With type custom, on OpenAI's routes.")] = None


ToolList = Annotated[list[ToolField], Meta(max_length=MAX_TOOLS)]
"""Type of the field `tools` in /openapi.json."""


class NamedFunctionField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: Annotated[str, Meta(description="Name of one of the tools.")]


class ToolChoiceField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This tool is called."""

    type: Literal["function", "custom"]
    function: Annotated[NamedFunctionField | None, Meta(description="With type function.")] = None
    custom: Annotated[NamedFunctionField | None, Meta(description="With type custom.")] = None


class AllowedToolsField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only these tools may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoiceField], Meta(max_length=MAX_TOOLS)]


class ChosenTools(NamedTuple):
    """The tools that may be called, the index of each in the client's list, and the choice among them."""

    tools: tuple[Tool, ...]
    places: tuple[int, ...]
    choice: ToolChoice


def read_tools(value: Any, field: str = "tools", *, custom: bool = False) -> tuple[Tool, ...]:
    """Reads OpenAI's list of tools, `custom` ones too where the API has them; null is none.

    Raises InvalidRequest naming the field.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest(f"{field} must be a list of tools, got {echo(value)}", field=field)
    _check_number(value, field)
    tools = []
    for index, item in enumerate(value):
        path = f"{field}[{index}]"
        entry = _entry(item, ToolField, path)
        if entry.type == "custom" and not custom:
            raise InvalidRequest(f"{path}.type must be function, got 'custom'", field=f"{path}.type")
        body = getattr(entry, entry.type)
        _check_only(entry, path)
        tools.append(
            _custom(body, path) if entry.type == "custom" else msgspec.convert(msgspec.structs.asdict(body), Tool)
        )
    return check_tools(tools, field, "function.")


def _check_only(entry: ToolField | ToolChoiceField, path: str) -> None:
    """Raises InvalidRequest unless the entry has what its type names, and nothing else."""
    for kind in ("function", "custom"):
        if (getattr(entry, kind) is not None) is not (kind == entry.type):
            problem = "is missing" if kind == entry.type else f"needs {path}.type {kind}"
            raise InvalidRequest(f"{path}.{kind} {problem}", field=f"{path}.{kind}")


def _custom(entry: CustomField, path: str) -> Tool:
    kind = entry.format or CustomFormat(type="text")
    if (kind.grammar is not None) is not (kind.type == "grammar"):
        place = f"{path}.custom.format"
        problem = "is missing" if kind.grammar is None else f"needs {place}.type grammar"
        raise InvalidRequest(f"{place}.grammar {problem}", field=f"{place}.grammar")
    free_input = FreeInput()
    if kind.grammar is not None:
        free_input = FreeInput(syntax=kind.grammar.syntax, definition=kind.grammar.definition)
    return custom_tool(entry.name, entry.description, free_input)


def custom_tool(name: str, description: str, free_input: FreeInput) -> Tool:
    """Returns a custom tool as models call it: a function with one string, whose description has the grammar."""
    schema: dict[str, Any] = {"type": "string"}
    if free_input.syntax != "text":
        schema["description"] = f"Text that matches this {free_input.syntax} grammar:\n{free_input.definition}"
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object", "properties": {"input": schema}, "required": ["input"], "additionalProperties": False,
        },
        strict=free_input.syntax != "text",
        free_input=free_input,
    )  # fmt: skip


def check_tools(
    tools: Sequence[Tool],
    field: str,
    inside: str = "",
    parameters: str = "parameters",
    places: Sequence[int] | None = None,
) -> tuple[Tool, ...]:
    """Returns the tools if their number, names and schemas are allowed. Raises InvalidRequest.

    An error names `field[index]`, then `inside`, then `name` or what the API calls the schema (`parameters`).
    `places`: the index of each tool in the client's list, if some tools were dropped.
    """
    _check_number(tools, field)
    seen: set[str] = set()
    for index, tool in zip(range(len(tools)) if places is None else places, tools, strict=True):
        path = f"{field}[{index}].{inside}"
        if not NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"{path}name must be 1 to 64 letters, digits, '_', '.' or '-', got {echo(tool.name)}",
                field=f"{path}name",
            )
        if tool.name in seen:
            raise InvalidRequest(f"{path}name {echo(tool.name)} is a duplicate; rename one", field=f"{path}name")
        seen.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            raise InvalidRequest(
                f'{path}{parameters} must be a schema of "type": "object", got type '
                f"{echo(tool.parameters['type'])}; make the value a property of an object",
                field=f"{path}{parameters}",
            )
    return tuple(tools)


def _check_number(tools: Sequence[Any], field: str) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{field} takes at most {MAX_TOOLS} tools, got {len(tools)}", field=field)


def read_tool_choice(value: Any, tools: Sequence[Tool], field: str = "tool_choice") -> ToolChoice:
    """Reads a tool choice in OpenAI's forms; None = auto. Without tools it is none. Raises InvalidRequest."""
    if value is None or isinstance(value, str):
        if value is not None and value not in CHOICES:
            raise InvalidRequest(
                f'{field} must be "auto", "none", "required" or {{"type": "function", "function": {{"name": …}}}}, '
                f"got {echo(value)}",
                field=field,
            )
        return choose(ToolChoice(value or "auto"), tools, field)  # type: ignore[arg-type]
    if isinstance(value, dict) and value.get("type") not in (None, "function", "custom"):
        raise InvalidRequest(
            f'{field}.type must be "function", "custom" or "allowed_tools", got {echo(value["type"])}; '
            "send only the tools that may be called",
            field=f"{field}.type",
        )
    if isinstance(value, dict) and value.get("type") is None and "function" in value:
        value = value | {"type": "function"}  # TGI's clients leave it out
    named = _entry(value, ToolChoiceField, field)
    _check_only(named, field)
    name, name_field = getattr(named, named.type).name, f"{field}.{named.type}.name"
    chosen = choose(ToolChoice("required", name), tools, field, name_field)
    if any(tool.name == name and (tool.free_input is not None) is not (named.type == "custom") for tool in tools):
        raise InvalidRequest(f"{name_field} {echo(name)} is a tool of another type", field=name_field)
    return chosen


def chosen_tools(value: Any, tools: Sequence[Tool], field: str = "tool_choice") -> ChosenTools:
    """Reads a tool choice as `read_tool_choice` does, or OpenAI's `allowed_tools`: the model is shown these tools only.

    Raises InvalidRequest.
    """
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        return ChosenTools(tuple(tools), tuple(range(len(tools))), read_tool_choice(value, tools, field))
    inside = f"{field}.allowed_tools"
    allowed = _entry(value.get("allowed_tools"), AllowedToolsField, inside)
    choices = [
        read_tool_choice(msgspec.to_builtins(entry), tools, f"{inside}.tools[{index}]")
        for index, entry in enumerate(allowed.tools)
    ]
    names = {choice.name for choice in choices}
    places = tuple(index for index, tool in enumerate(tools) if tool.name in names)
    left = tuple(tools[index] for index in places)
    return ChosenTools(left, places, choose(ToolChoice(allowed.mode), left, field))


def choose(choice: ToolChoice, tools: Sequence[Tool], field: str, name_field: str = "") -> ToolChoice:
    """Returns the choice if there are tools for it. Without tools, `auto` becomes `none`.

    `field`: the choice's field; `name_field`: that of the tool's name in it. Raises InvalidRequest.
    """
    if choice.mode == "required" and not tools:
        raise InvalidRequest(f"{field} asks for a tool call but there are no tools; send tools too", field=field)
    if choice.name is not None and choice.name not in [tool.name for tool in tools]:
        names = ", ".join(tool.name for tool in tools[:8])
        raise InvalidRequest(
            f"{name_field or field} {echo(choice.name)} is not one of the tools ({names}{', …' * (len(tools) > 8)})",
            field=name_field or field,
        )
    return choice if tools else ToolChoice("none")


def read_arguments(text: str | None) -> dict[str, Any] | str:
    """Parse the arguments of a call that a client sends back: an object; blank text, null and None are {}.

    Return any other text as it is: a model wrote it in an earlier answer, and refusing it would end the conversation.
    """
    try:
        arguments = msgspec.json.decode(text) if text and text.strip() else None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        arguments = text
    if text is None or arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else text


def call_id() -> str:
    """Makes a random id of a tool call in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _entry(value: Any, kind: type[T], path: str) -> T:
    """Converts a tool or a tool choice. Reports unknown fields as ignored. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object, got {echo(value)}", field=path)
    return convert(value, kind, _under(path), TELLS_UNKNOWN)


def _under(path: str) -> Callable[[str], str]:
    return lambda name: f"{path}.{name}" if name else path
