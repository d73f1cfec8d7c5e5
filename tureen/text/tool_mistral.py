"""Parses tool calls of Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; of newer models each call is
`[TOOL_CALLS]name[ARGS]{…}`. `tools.ToolFormat` documents what this module offers.

Source: https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.brackets import JSON, Brackets
from tureen.text.call_parser import CallParser
from tureen.text.call_tags import call_tag, listed_calls
from tureen.text.messages import Tool

ORDER = 1
NAMES: tuple[str, ...] = ("mistral",)
BEGIN = "[TOOL_CALLS]"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True

NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?(?:\[ARGS\])?\s{0,16}\{")
MAX_NAMED_CHARS = 200


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> CallParser:
    """Makes the parser of one output."""
    return MistralParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any] | None:
    """Returns None when the model may call or not: the mark is a special token, which cannot be part of a
    constraint."""
    if not required:
        return None
    tags = [call_tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}") for tool in tools]
    calls = listed_calls(tags, ", ", parallel=parallel)
    return {"type": "tag", "begin": f"{BEGIN} [", "content": calls, "end": "]"}


class MistralParser(CallParser):
    """Reads a list of calls, or a call by name, after the mark."""

    MARK = BEGIN

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._is_list = False

    def _opening(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        self._is_list = first == "["
        if self._is_list:
            self._pass(1, self._raw)
            self._read = self._item
        elif first:
            self._read = self._named

    def _item(self, is_end: bool) -> None:
        super()._opening(is_end)

    def _named(self, is_end: bool) -> None:
        limit = self._at + MAX_NAMED_CHARS
        brace = self._rest.find("{", self._at, limit)
        if brace < 0 and len(self._rest) < limit and not is_end:
            return
        match = NAMED.match(self._rest, self._at)
        if match is None or match[1] not in self._tools:
            self._give_up()
            return
        self._begin_call(match[1])
        self._at = match.end()
        self._brackets = Brackets(JSON, opened="{")
        self._brackets.text.append("{")
        self._read = self._bare_arguments

    def _bare_arguments(self, is_end: bool) -> None:
        bracket = self._step_over(0)
        self._raw.clear()
        self._add_arguments(self._brackets.take())
        if bracket:
            self._end_call()

    def _after(self, is_end: bool) -> None:
        if not self._is_list:
            self._read = self._prose
            return
        first = self._pass_space(self._space)
        if first == ",":
            self._pass(1, self._raw)
            self._read = self._item
        elif first:
            self._at += 1 if first == "]" else 0
            self._read = self._prose
