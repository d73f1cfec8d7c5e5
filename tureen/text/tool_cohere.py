"""Command R7B and Command A:
`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>`.

Source: https://docs.cohere.com/docs/command-a-hf
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import ListParser
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool

ORDER = 14
NAMES: tuple[str, ...] = ("cohere_command3", "cohere_command4")
BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> CohereParser:
    return CohereParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains a list of calls between the marks, which may appear anywhere in the text."""
    tags = [call_tag(f'{{"tool_name": "{tool.name}", "parameters": ', tool, "}") for tool in tools]
    listed = listed_calls(tags, ",\n    ", parallel=parallel)
    block = {"type": "tag", "begin": f"{BEGIN}[\n    ", "content": listed, "end": f"\n]{END}"}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class CohereParser(ListParser):
    MARK = BEGIN
    END = END
    NAME = "tool_name"
