"""Parses tool calls of Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; of newer models each call is
`[TOOL_CALLS]name[ARGS]{…}`. `tools.ToolFormat` documents what this module offers.

Source: https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import ListParser
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool

ORDER = 31
NAMES: tuple[str, ...] = ("mistral",)
BEGIN = "[TOOL_CALLS]"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True

NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?(?:\[ARGS\])?\s{0,16}\{")


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> ListParser:
    """Makes the parser of one output."""
    return MistralParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains a list of calls after the mark, which may appear anywhere in the text."""
    tags = [call_tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}") for tool in tools]
    calls = listed_calls(tags, ", ", parallel=parallel)
    block = {"type": "tag", "begin": f"{BEGIN} [", "content": calls, "end": "]"}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class MistralParser(ListParser):
    """Reads a list of calls, or a call by name, after the mark."""

    MARK = BEGIN

    def _no_list(self, is_end: bool) -> None:
        self._pass_name(NAMED, is_end)
