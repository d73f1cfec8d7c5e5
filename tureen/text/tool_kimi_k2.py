"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, between marks for all
calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool
from tureen.text.named_parser import NamedParser

ORDER = 29
NAMES: tuple[str, ...] = ("kimi_k2",)
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> NamedParser:
    return KimiParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains the calls between their marks, which may appear anywhere in the text. The number is always 0: the
    server gives calls their ids."""
    tags = [call_tag(f"{CALL}functions.{tool.name}:0{ARGUMENTS}", tool, CALL_END) for tool in tools]
    block = {"type": "tag", "begin": BEGIN, "content": listed_calls(tags, "", parallel=parallel), "end": END}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class KimiParser(NamedParser):
    MARK = BEGIN
    NAMED = re.compile(
        rf"(?:{re.escape(CALL)})?\s{{0,16}}(?:functions\.)?([A-Za-z0-9_.-]{{1,64}})(?::[0-9]{{1,6}})?\s{{0,16}}"
        rf"{re.escape(ARGUMENTS)}\s{{0,16}}\{{"
    )
    ENDS = (CALL_END, END)
    NEXT = CALL
