"""DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, between marks for all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool
from tureen.text.tool_deepseek_v3 import BEGIN, CALL, CALL_END, END, SEPARATOR, DeepseekParser

ORDER = 21
NAMES: tuple[str, ...] = ("deepseek_v31", "deepseekv31")
MARKS: tuple[str, ...] = (CALL,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> DeepseekParser:
    return DeepseekParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains the calls between their marks, which may appear anywhere in the text."""
    tags = [call_tag(f"{CALL}{tool.name}{SEPARATOR}", tool, CALL_END) for tool in tools]
    block = {"type": "tag", "begin": BEGIN, "content": listed_calls(tags, "", parallel=parallel), "end": END}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)
