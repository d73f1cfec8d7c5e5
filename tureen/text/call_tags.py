"""Makes the structural tags by which the formats of tool calls constrain calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tureen.text.messages import FreeInput, Tool

INPUT_TAGS = {
    "qwen_xml": ("<parameter=input>\n", "\n</parameter>\n"),
    "minimax_xml": ('<parameter name="input">', "</parameter>\n"),
    "step3_xml": ('<steptml:parameter name="input">', "</steptml:parameter>\n"),
    "glm_xml": ("\n<arg_key>input</arg_key>\n<arg_value>", "</arg_value>\n"),
    "deepseek_xml": ('<｜DSML｜parameter name="input" string="true">', "</｜DSML｜parameter>\n"),
}
"""Style that writes arguments in tags -> the texts before and after the argument `input`, a string."""


def call_tag(begin: str, tool: Tool, end: str, style: str = "json") -> dict[str, Any]:
    """Returns the tag of one call, whose arguments are valid and written in this style."""
    content = {"type": "json_schema", "json_schema": tool.parameters}
    if style != "json":
        content["style"] = style
    if tool.free_input is not None and tool.free_input.syntax != "text":
        content = _free_input(tool.free_input) if style == "json" else _raw_input(tool.free_input, style)
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _free_input(free_input: FreeInput) -> dict[str, Any]:
    """Returns the format of `{"input": …}` with a text that the grammar allows."""
    kind = "grammar" if free_input.syntax == "lark" else "pattern"
    text = {"type": "json_string", kind: free_input.definition}
    ends = [{"type": "const_string", "value": value} for value in ('{"input": ', "}")]
    return {"type": "sequence", "elements": [ends[0], text, ends[1]]}


def _raw_input(free_input: FreeInput, style: str) -> dict[str, Any]:
    """Returns the format of the argument `input` in tags, with a text that the grammar allows."""
    kind, key = ("grammar", "grammar") if free_input.syntax == "lark" else ("regex", "pattern")
    begin, end = ({"type": "const_string", "value": value} for value in INPUT_TAGS[style])
    return {"type": "sequence", "elements": [begin, {"type": kind, key: free_input.definition}, end]}


def is_raw_input(layout: Mapping[str, Any]) -> bool:
    """Returns whether a format is an argument in tags that `_raw_input` made: its second element is the text."""
    begins = [begin for begin, _ in INPUT_TAGS.values()]
    return layout["type"] == "sequence" and layout["elements"][0].get("value") in begins


def listed_calls(tags: list[dict[str, Any]], separator: str, *, parallel: bool) -> dict[str, Any]:
    """Returns one or more of the calls; exactly one if not `parallel`."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def triggered_calls(mark: str, tags: list[dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Returns free text in which one of the calls follows wherever the mark stands."""
    return {"type": "triggered_tags", "triggers": [mark], "tags": tags, "stop_after_first": not parallel}


def block_of_calls(
    begin: str, tags: list[dict[str, Any]], end: str, *, required: bool, parallel: bool
) -> dict[str, Any]:
    """Returns calls in a block: nothing else, or, if not required, wherever one begins."""
    calls = listed_calls(tags, "\n", parallel=parallel)
    block = {"type": "tag", "begin": f"{begin}\n", "content": calls, "end": f"\n{end}"}
    return block if required else triggered_calls(begin, [block], parallel=parallel)
