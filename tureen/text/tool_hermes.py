"""Parses tool calls of Hermes, Qwen 2.5 and 3, SmolLM3 and others: each call is
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. `tools.ToolFormat` documents what this module offers.

Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import CallParser
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool

ORDER = 30
NAMES: tuple[str, ...] = ("hermes", "qwen", "qwen25", "granite4")
BEGIN, END = "<tool_call>", "</tool_call>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = False
VARIES = False


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> CallParser:
    """Makes the parser of one output."""
    return HermesParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains calls, which are tags that may appear anywhere in the text."""
    if required:
        return listed_calls([_tag(tool) for tool in tools], "\n", parallel=parallel)
    return triggered_calls(BEGIN, [_tag(tool) for tool in tools], parallel=parallel)


def _tag(tool: Tool) -> dict[str, Any]:
    return call_tag(f'{BEGIN}\n{{"name": "{tool.name}", "arguments": ', tool, f"}}\n{END}")


class HermesParser(CallParser):
    """Reads calls between BEGIN and END."""

    MARK = BEGIN

    def _after(self, is_end: bool) -> None:
        if not self._pass_space(self._space) and not is_end:
            return
        if self._pass_mark(END, [], is_end) is not None:
            self._read = self._prose
