"""Finds the format in which a model writes tool calls. Each module `tool_<name>.py` of this package is a format."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from tureen.errors import StartupError, echo
from tureen.text.call_tags import is_raw_input
from tureen.text.messages import Part, Tool, ToolChoice

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolParser(Protocol):
    """Finds tool calls in a text that comes in pieces. Text that turns out to be no call is Content; nothing is
    lost."""

    def feed(self, text: str) -> list[Part]:
        """Reads a piece of text and returns the parts that are certain now."""

    def close(self) -> list[Part]:
        """Returns the rest; the text has ended."""


class ToolFormat(Protocol):
    """The functions and constants that each module `tool_<name>.py` has."""

    ORDER: int  # order in which formats are looked for in a chat template
    NAMES: tuple[str, ...]  # its names for --tool-call-parser
    MARKS: tuple[str, ...]  # a chat template that contains one of these teaches this format
    SPECIAL: bool  # its marks are special tokens, which must stay in the output's text
    VARIES: bool
    """Its models write calls in more ways than its constraint has. The parser reads all of them, so only `strict` is a
    reason to hold a model to the constraint, not that calls should not be parallel."""

    def parser(self, tools: Sequence[Tool], *, parallel: bool = True) -> ToolParser:
        """Makes the parser of one output; without `parallel` everything after the first call is dropped."""

    def structural_tag(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
        """Returns the `format` of a structural tag that constrains calls to the tools' schemas. With `required` the
        output is nothing but calls; without it the constraint holds wherever a call begins."""


def _find_formats() -> tuple[ToolFormat, ...]:
    names = [path.stem for path in Path(__file__).parent.glob("tool_*.py")]
    modules = [cast(ToolFormat, importlib.import_module(f"{__package__}.{name}")) for name in names]
    return tuple(sorted(modules, key=lambda module: module.ORDER))


FORMATS: tuple[ToolFormat, ...] = _find_formats()
PARSERS = {name: form for form in FORMATS for name in form.NAMES}


def tool_format(setting: str, template: str) -> ToolFormat | None:
    """Returns the format that --tool-call-parser names: a name, none, or auto, which takes the one that the chat
    template teaches; hermes where it teaches none.

    Raises StartupError naming the known ones.
    """
    if setting == "none":
        return None
    if setting == "auto":
        return next((form for form in FORMATS if any(mark in template for mark in form.MARKS)), PARSERS["hermes"])
    if setting not in PARSERS:
        raise StartupError(
            f"--tool-call-parser {echo(setting)}: there is no such parser; use auto, none, {', '.join(PARSERS)}",
            field="tool_call_parser",
        )
    return PARSERS[setting]


def marks_calls(texts: Iterable[str], setting: str) -> bool:
    """Returns whether calls may be marked by one of these special tokens. `setting`: --tool-call-parser."""
    forms = FORMATS if setting == "auto" else [PARSERS[setting]] if setting in PARSERS else []
    marks = [mark for form in forms if form.SPECIAL for mark in form.MARKS]
    return any(text in mark for text in texts for mark in marks)


def constraint(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> dict[str, Any] | None:
    """Returns the structural tag that makes outputs honour the tool choice, `strict` and `parallel`; None when none is
    needed."""
    if choice.mode == "none" or not tools:
        return None
    if choice.mode == "required":
        called = [tool for tool in tools if choice.name in (None, tool.name)]
        layout = form.structural_tag(
            [_with_object(tool) for tool in called], required=True, parallel=parallel and choice.name is None
        )
        if any(tool.strict for tool in called):
            for (part, _), tool in zip(_schema_formats(layout), called, strict=False):
                if not tool.strict and part["type"] == "json_schema":
                    part["strict"] = False
    else:
        if not any(tool.strict for tool in tools) and (parallel or form.VARIES):
            return None
        known = [_with_object(tool) if tool.strict else _free(tool) for tool in tools]
        layout = form.structural_tag(known, required=False, parallel=parallel)
    return _tag(form, layout)


def calls_or(form: ToolFormat, tools: Sequence[Tool], answer: Mapping[str, Any], *, parallel: bool) -> dict[str, Any]:
    """Returns the structural tag of an output that is calls of the tools and nothing else, or else is in `answer`, a
    format of structural tags. Arguments are valid where a tool is strict; of other tools they are an object."""
    known = [_with_object(tool) if tool.strict else _free(tool) for tool in tools]
    calls = form.structural_tag(known, required=True, parallel=parallel)
    return _tag(form, {"type": "or", "elements": [calls, answer]})


def _tag(form: ToolFormat, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the structural tag of a format. Marks that are special tokens may be written as such."""
    return {"type": "structural_tag", "format": layout} | ({"special_tokens": True} if form.SPECIAL else {})


def _with_object(tool: Tool) -> Tool:
    schema = tool.parameters or NO_ARGUMENTS
    return msgspec.structs.replace(tool, parameters={**schema, "type": "object"})


def _free(tool: Tool) -> Tool:
    return msgspec.structs.replace(tool, parameters={"type": "object"})


def schema_fields(
    tag: Mapping[str, Any],
    tools: Sequence[Tool],
    choice: ToolChoice,
    field: str = "tools[{}].function.parameters",
    grammar_field: str = "tools[{}].custom.format.grammar.definition",
    places: Sequence[int] = (),
) -> dict[str, str]:
    """Returns what errors about the grammar of `tag` name, the paths of the tools' schemas and grammars in it -> the
    client's fields.

    `field`, `grammar_field`: the client's field of a tool's schema or grammar, with {} for the tool's index.
    `places`: the index of each tool in the client's list; (): as in `tools`.
    """
    called = [index for index, tool in enumerate(tools) if choice.name in (None, tool.name)]
    paths = _schema_paths(tag["format"], "structural_tag.format")  # one for each tool that may be called, in order
    return {
        path: (grammar_field if tools[index].free_input is not None else field).format(
            places[index] if places else index
        )
        for path, index in zip(paths, called, strict=False)
    }


def _schema_paths(layout: dict[str, Any], path: str) -> Iterator[str]:
    for part, place in _schema_formats(layout, path):
        kind = part["type"]
        yield f"{place}.{kind if kind == 'json_schema' else 'grammar' if 'grammar' in part else 'pattern'}"


def _schema_formats(layout: dict[str, Any], path: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the formats of arguments in a layout, and their paths."""
    if is_raw_input(layout):
        yield layout["elements"][1], f"{path}.elements[1]"
        return
    if layout["type"] in ("json_schema", "json_string"):
        yield layout, path
    for name in ("elements", "tags"):
        for index, inner in enumerate(layout.get(name, ())):
            yield from _schema_formats(inner, f"{path}.{name}[{index}]")
    if isinstance(layout.get("content"), dict):
        yield from _schema_formats(layout["content"], f"{path}.content")
