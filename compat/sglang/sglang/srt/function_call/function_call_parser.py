"""The parser of tool calls, over tureen's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang.srt.function_call.core_types import ToolCallItem
from tureen.fields.tools import read_tools
from tureen.text.messages import CallArguments, CallStart, Content, Part
from tureen.text.tools import PARSERS


class FunctionCallParser:
    """Finds the calls of tools in a model's output. Raises ValueError for a format that tureen does not have."""

    ToolCallParserEnum = PARSERS

    def __init__(self, tools: Sequence[Any], tool_call_parser: str) -> None:
        if tool_call_parser not in PARSERS:
            raise ValueError(f"tool_call_parser must be one of {', '.join(PARSERS)}, got {tool_call_parser!r}")
        self._form = PARSERS[tool_call_parser]
        self._tools = read_tools(msgspec.to_builtins(list(tools)))
        self._stream = self._form.parser(self._tools)

    def has_tool_call(self, text: str) -> bool:
        """Return whether the text has a call."""
        return bool(self.parse_non_stream(text)[1])

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """Return the text without its calls, and the calls."""
        reading = self._form.parser(self._tools)
        text, items = _items(reading.feed(full_text) + reading.close())
        calls: list[ToolCallItem] = []
        for item in items:
            if item.name is None:
                calls[item.tool_index].parameters += item.parameters
            else:
                calls.append(item)
        places = {tool.name: place for place, tool in enumerate(self._tools)}
        for call in calls:
            call.tool_index = places[call.name or ""]
        return text, calls

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        """Return the text and the pieces of calls that this piece of the output completes."""
        return _items(self._stream.feed(chunk_text))


def _items(parts: Sequence[Part]) -> tuple[str, list[ToolCallItem]]:
    texts: list[str] = []
    items: list[ToolCallItem] = []
    for part in parts:
        match part:
            case CallStart(index, name):
                items.append(ToolCallItem(tool_index=index, name=name))
            case CallArguments(index, piece):
                items.append(ToolCallItem(tool_index=index, parameters=piece))
            case Content(piece):
                texts.append(piece)
    return "".join(texts), items
