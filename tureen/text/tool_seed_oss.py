"""Seed-OSS: calls as Qwen3-Coder writes them, between `<seed:tool_call>` and `</seed:tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text import tool_qwen3_coder
from tureen.text.messages import Tool
from tureen.text.tool_qwen3_coder import Qwen3CoderParser

ORDER = 9  # the templates have the mark of Qwen3-Coder, too
NAMES: tuple[str, ...] = ("seed_oss",)
BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = False


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> SeedParser:
    return SeedParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    return tool_qwen3_coder.tagged_calls(BEGIN, tools, END, required=required, parallel=parallel)


class SeedParser(Qwen3CoderParser):
    MARK = BEGIN
    BLOCK_END = END
