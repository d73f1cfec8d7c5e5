"""Parses tool calls of Llama 3: the answer is `{"name": …, "parameters": {…}}`, maybe after `<|python_tag|>`; further
calls follow a `;`. `tools.ToolFormat` documents what this module offers.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/ (JSON based tool calling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import CallParser
from tureen.text.call_tags import call_tag, listed_calls
from tureen.text.messages import Tool

ORDER = 32
NAMES: tuple[str, ...] = ("llama3", "llama3_json")
TAG = "<|python_tag|>"
MARKS: tuple[str, ...] = (TAG, '"parameters": dictionary')
SPECIAL = True
VARIES = False

NO_CALL = r"[^\s{<]|<+[^|<]"
"""Pattern of the beginning of an answer that is no call."""


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> CallParser:
    """Makes the parser of one output."""
    return Llama3Parser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains the answer to calls, or without `required` to calls or a text that does not begin like one."""
    tags = [call_tag(f'{{"name": "{tool.name}", "parameters": ', tool, "}") for tool in tools]
    calls = listed_calls(tags, "; ", parallel=parallel)
    if required:
        return calls
    text = {
        "type": "sequence",
        "elements": [{"type": "regex", "pattern": NO_CALL}, {"type": "any_text", "excludes": [TAG]}],
    }
    return {"type": "or", "elements": [calls, text]}


class Llama3Parser(CallParser):
    """Reads calls at the beginning of the answer or after the tag."""

    MARK = TAG

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._read = self._start

    def _start(self, is_end: bool) -> None:
        first = self._pass_space(self._space)
        if first == "{":
            self._begin_object()
        elif first:
            self._read = self._prose

    def _opening(self, is_end: bool) -> None:
        """State: after the tag, or after a `;`, which the tag may follow."""
        self._pass_space(self._raw)
        if self._pass_mark(TAG, self._raw, is_end) is False:
            super()._opening(is_end)

    def _after(self, is_end: bool) -> None:
        first = self._pass_space(self._space)
        if first == ";":
            self._pass(1, self._raw)
            self._read = self._opening
        elif first == "{":
            self._begin_object()
        elif first:
            self._read = self._prose
