"""MiniMax M2: `<minimax:tool_call><invoke name="…"><parameter name="key">value</parameter></invoke>…`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import block_of_calls, call_tag
from tureen.text.messages import Tool
from tureen.text.tagged_parser import TaggedParser

ORDER = 12
NAMES: tuple[str, ...] = ("minimax_m2", "minimax-m2")
BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = False
VARIES = False


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> TaggedParser:
    return MinimaxParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    tags = [call_tag(f'<invoke name="{tool.name}">\n', tool, "</invoke>", "minimax_xml") for tool in tools]
    return block_of_calls(BEGIN, tags, END, required=required, parallel=parallel)


class MinimaxParser(TaggedParser):
    MARK = BEGIN
    CALL = r'<invoke name="([^"<>\s]{1,64})">'
    CALL_END = "</invoke>"
    BLOCK_END = END
    ARGUMENT = r'<parameter name="([^"<>\n]{1,200})">'
    ARGUMENT_END = "</parameter>"
