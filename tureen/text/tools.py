"""Finds the format in which a model writes tool calls. Each file `tool_<name>.py` beside this one is a format."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from tureen.errors import InvalidRequest, StartupError, echo
from tureen.text.messages import Part, Tool, ToolChoice

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolParser(Protocol):
    """Finds tool calls in a text that comes in pieces. What is no call after all is Content; nothing is lost."""

    def feed(self, text: str) -> list[Part]: ...

    def close(self) -> list[Part]: ...


class ToolFormat(Protocol):
    """The functions and constants that a module `tool_<name>.py` offers."""

    ORDER: int  # a chat template is asked in this order whose format it teaches
    NAMES: tuple[str, ...]  # what --tool-call-parser calls it
    MARKS: tuple[str, ...]  # a chat template that holds one of these teaches this format
    SPECIAL: bool  # its marks are special tokens: they must stay in the text

    def parser(self, tools: Sequence[Tool], *, parallel: bool = True) -> ToolParser:
        """Not `parallel`: the answer ends with its first call."""

    def structural_tag(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
        """The `format` of calls with these parameters: nothing else, or, if not required, wherever one begins.

        None where that cannot be enforced in this format.
        """


def _find_formats() -> tuple[ToolFormat, ...]:
    names = [path.stem for path in Path(__file__).parent.glob("tool_*.py")]
    modules = [cast(ToolFormat, importlib.import_module(f"{__package__}.{name}")) for name in names]
    return tuple(sorted(modules, key=lambda module: module.ORDER))


FORMATS: tuple[ToolFormat, ...] = _find_formats()
PARSERS = {name: one for one in FORMATS for name in one.NAMES}


def tool_format(setting: str, template: str) -> ToolFormat | None:
    """Returns the format that --tool-call-parser names: a name, none, or auto, which takes the one that the chat
    template teaches; hermes where it teaches none.

    Raises StartupError naming the known ones.
    """
    if setting == "none":
        return None
    if setting == "auto":
        return next((one for one in FORMATS if any(mark in template for mark in one.MARKS)), PARSERS["hermes"])
    if setting not in PARSERS:
        raise StartupError(
            f"--tool-call-parser {echo(setting)}: there is no such parser; use auto, none, {', '.join(PARSERS)}",
            field="tool_call_parser",
        )
    return PARSERS[setting]


def constraint(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> dict[str, Any] | None:
    """The structural tag that makes the output honour the choice, `strict` and `parallel`; None where any output does,
    read by the format's parser.

    Raises InvalidRequest where none can.
    """
    if choice.mode == "none" or not tools:
        return None
    if choice.mode == "required":
        called = [tool for tool in tools if choice.name in (None, tool.name)]
        layout = form.structural_tag(
            [_with_object(tool) for tool in called], required=True, parallel=parallel and choice.name is None
        )
    else:
        strict = next((tool.name for tool in tools if tool.strict), None)
        if strict is None and parallel:
            return None
        known = [_with_object(tool) if tool.strict else _free(tool) for tool in tools]
        layout = form.structural_tag(known, required=False, parallel=parallel)
        if layout is None and strict is not None:
            raise InvalidRequest(
                f"tools: strict ({strict}) cannot be kept with tool_choice auto in the format {form.NAMES[0]}, whose "
                "mark is a special token; leave strict out, or send tool_choice required",
                field="tools",
            )
    return None if layout is None else {"type": "structural_tag", "format": layout}


def _with_object(tool: Tool) -> Tool:
    schema = tool.parameters or NO_ARGUMENTS
    return msgspec.structs.replace(tool, parameters={**schema, "type": "object"})


def _free(tool: Tool) -> Tool:
    return msgspec.structs.replace(tool, parameters={"type": "object"})


def schema_places(
    tag: Mapping[str, Any], tools: Sequence[Tool], choice: ToolChoice, field: str = "tools[{}].function.parameters"
) -> dict[str, str]:
    """Returns the names that errors of a constraint's grammar have for the tools' schemas -> the client's names."""
    called = [index for index, tool in enumerate(tools) if choice.name in (None, tool.name)]
    paths = _schema_paths(tag["format"], "structural_tag.format")  # one for each tool that may be called
    return {path: field.format(index) for path, index in zip(paths, called, strict=True)}


def _schema_paths(layout: Mapping[str, Any], path: str) -> Iterator[str]:
    if layout["type"] == "json_schema":
        yield f"{path}.json_schema"
    for name in ("elements", "tags"):
        for index, one in enumerate(layout.get(name, ())):
            yield from _schema_paths(one, f"{path}.{name}[{index}]")
    if isinstance(layout.get("content"), dict):
        yield from _schema_paths(layout["content"], f"{path}.content")
