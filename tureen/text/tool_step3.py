"""Step-3: `<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"><steptml:parameter name="key">value…`,
between marks for all calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import block_of_calls, call_tag
from tureen.text.messages import Tool
from tureen.text.tagged_parser import TaggedParser

ORDER = 28
NAMES: tuple[str, ...] = ("step3",)
BEGIN, END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END = "<｜tool_call_begin｜>function<｜tool_sep｜>", "</steptml:invoke><｜tool_call_end｜>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> TaggedParser:
    return Step3Parser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    tags = [call_tag(f'{CALL}<steptml:invoke name="{tool.name}">\n', tool, CALL_END, "step3_xml") for tool in tools]
    return block_of_calls(BEGIN, tags, END, required=required, parallel=parallel)


class Step3Parser(TaggedParser):
    MARK = BEGIN
    CALL = rf'{CALL}\s{{0,16}}<steptml:invoke name="([^"<>\s]{{1,64}})">'
    CALL_END = CALL_END
    BLOCK_END = END
    ARGUMENT = r'<steptml:parameter name="([^"<>\n]{1,200})">'
    ARGUMENT_END = "</steptml:parameter>"
