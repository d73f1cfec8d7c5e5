"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; newer models `[TOOL_CALLS]name[ARGS]{…}`, once a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import ListParser
from tureen.text.call_tags import call_tag, listed_calls
from tureen.text.messages import Tool

ORDER = 31
NAMES: tuple[str, ...] = ("mistral",)
BEGIN = "[TOOL_CALLS]"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True

NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?(?:\[ARGS\])?\s{0,16}\{")


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> ListParser:
    return MistralParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
    """None where the model is free to call or not: the mark, a special token, cannot be part of a constraint."""
    if not required:
        return None
    tags = [call_tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}") for tool in tools]
    calls = listed_calls(tags, ", ", parallel=parallel)
    return {"type": "tag", "begin": f"{BEGIN} [", "content": calls, "end": "]"}


class MistralParser(ListParser):
    MARK = BEGIN

    def _no_list(self, is_end: bool) -> None:
        self._pass_name(NAMED, is_end)
