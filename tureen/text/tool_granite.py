"""Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`; later ones write calls as Hermes does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import ListParser
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool

ORDER = 22
NAMES: tuple[str, ...] = ("granite",)
BEGIN = "<|tool_call|>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> ListParser:
    return GraniteParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains a list of calls after the mark, which may appear anywhere in the text."""
    tags = [call_tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}") for tool in tools]
    block = {"type": "tag", "begin": f"{BEGIN}[", "content": listed_calls(tags, ", ", parallel=parallel), "end": "]"}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class GraniteParser(ListParser):
    MARK = BEGIN
