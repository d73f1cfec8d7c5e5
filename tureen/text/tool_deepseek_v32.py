"""DeepSeek V3.2: `<｜DSML｜function_calls><｜DSML｜invoke name="…"><｜DSML｜parameter name="key" string="true">…`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import block_of_calls, call_tag
from tureen.text.messages import Tool
from tureen.text.tagged_parser import TaggedParser

ORDER = 13
NAMES: tuple[str, ...] = ("deepseek_v32", "deepseekv32")
BEGIN, END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
MARKS: tuple[str, ...] = ("｜DSML｜",)
SPECIAL = False
VARIES = False


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> TaggedParser:
    return DeepseekV32Parser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    tags = [
        call_tag(f'<｜DSML｜invoke name="{tool.name}">\n', tool, "</｜DSML｜invoke>", "deepseek_xml") for tool in tools
    ]
    return block_of_calls(BEGIN, tags, END, required=required, parallel=parallel)


class DeepseekV32Parser(TaggedParser):
    MARK = BEGIN
    CALL = r'<｜DSML｜invoke name="([^"<>\s]{1,64})">'
    CALL_END = "</｜DSML｜invoke>"
    BLOCK_END = END
    ARGUMENT = r'<｜DSML｜parameter name="([^"<>\n]{1,200})" string="(true|false)">'
    ARGUMENT_END = "</｜DSML｜parameter>"
