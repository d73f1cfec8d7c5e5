"""DeepSeek V3 and R1: a name between special tokens, then JSON in a block of code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool
from tureen.text.named_parser import NamedParser

ORDER = 20
NAMES: tuple[str, ...] = ("deepseek_v3", "deepseekv3")
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS: tuple[str, ...] = (f"'{CALL}' + tool['type'] + '{SEPARATOR}'",)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> NamedParser:
    return DeepseekParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains the calls between their marks, which may appear anywhere in the text."""
    begin, end = f"{CALL}function{SEPARATOR}{{}}\n```json\n", f"\n```{CALL_END}"
    tags = [call_tag(begin.format(tool.name), tool, end) for tool in tools]
    block = {"type": "tag", "begin": BEGIN, "content": listed_calls(tags, "\n", parallel=parallel), "end": END}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class DeepseekParser(NamedParser):
    """Reads the calls of V3.1, too."""

    MARK = BEGIN
    NAMED = re.compile(
        rf"(?:{CALL})?(?:function{SEPARATOR})?\s{{0,16}}([A-Za-z0-9_.-]{{1,64}})\s{{0,16}}"
        rf"(?:{SEPARATOR})?\s{{0,16}}(?:```json)?\s{{0,16}}\{{"
    )
    ENDS = ("```", CALL_END, END)
    NEXT = CALL
