"""Structural tags of calls: what the formats of tool calls say of the text that a model may write."""

from __future__ import annotations

from typing import Any

from tureen.text.messages import Tool


def call_tag(begin: str, tool: Tool, end: str, style: str = "json") -> dict[str, Any]:
    """Returns the tag of one call, whose arguments are valid and written in this style."""
    content = {"type": "json_schema", "json_schema": tool.parameters}
    return {
        "type": "tag",
        "begin": begin,
        "content": content if style == "json" else content | {"style": style},
        "end": end,
    }


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
