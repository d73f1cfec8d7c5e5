"""Hunyuan A13B: `<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import ListParser
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool

ORDER = 26
NAMES: tuple[str, ...] = ("hunyuan", "hunyuan_a13b", "jamba")
BEGIN, END = "<tool_calls>", "</tool_calls>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> HunyuanParser:
    return HunyuanParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains a list of calls between the marks, which may appear anywhere in the text."""
    tags = [call_tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}") for tool in tools]
    listed = listed_calls(tags, ", ", parallel=parallel)
    block = {"type": "tag", "begin": f"{BEGIN}[", "content": listed, "end": f"]{END}"}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class HunyuanParser(ListParser):
    MARK = BEGIN
    END = END
