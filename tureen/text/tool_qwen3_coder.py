"""Qwen3-Coder, Step-3.5: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool
from tureen.text.tagged_parser import TaggedParser

ORDER = 10
NAMES: tuple[str, ...] = ("qwen3_coder", "qwen3_xml", "mimo", "step3p5")
BEGIN, END = "<tool_call>", "</tool_call>"
MARKS: tuple[str, ...] = ("<function=",)
SPECIAL = False
VARIES = False


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> TaggedParser:
    return Qwen3CoderParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    return tagged_calls(BEGIN, tools, END, required=required, parallel=parallel)


def tagged_calls(begin: str, tools: Sequence[Tool], end: str, *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains calls, each between the marks, which may appear anywhere in the text."""
    tags = [call_tag(f"{begin}\n<function={tool.name}>\n", tool, f"</function>\n{end}", "qwen_xml") for tool in tools]
    return listed_calls(tags, "\n", parallel=parallel) if required else triggered_calls(begin, tags, parallel=parallel)


class Qwen3CoderParser(TaggedParser):
    MARK = BEGIN
    CALL = r"<function=([^<>\s]{1,64})>"
    CALL_END = "</function>"
    BLOCK_END = END
    ARGUMENT = r"<parameter=([^<>\n]{1,200})>"
    ARGUMENT_END = "</parameter>"
    IS_WRAPPED = True
