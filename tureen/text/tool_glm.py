"""GLM 4.5 to 4.7: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, once a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool
from tureen.text.tagged_parser import TaggedParser

ORDER = 11
NAMES: tuple[str, ...] = ("glm45", "glm47", "glm")
BEGIN, END = "<tool_call>", "</tool_call>"
MARKS: tuple[str, ...] = ("<arg_key>",)
SPECIAL = False
VARIES = False


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> TaggedParser:
    return GlmParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    tags = [call_tag(f"{BEGIN}{tool.name}", tool, END, "glm_xml") for tool in tools]
    return listed_calls(tags, "\n", parallel=parallel) if required else triggered_calls(BEGIN, tags, parallel=parallel)


class GlmParser(TaggedParser):
    MARK = BEGIN
    CALL = r"([^<>\s]{1,64})\s{0,16}(?=<arg_key>|</tool_call>)"
    CALL_END = END
    ARGUMENT = r"<arg_key>([^<>\n]{1,200})</arg_key>\s{0,16}<arg_value>"
    ARGUMENT_END = "</arg_value>"
