"""Parses tool calls of Llama 4 and the small Llama 3.2 models: the answer is a list of calls in Python,
`[name(a=1, b='x'), other()]`. A call is read when it is complete, so its arguments come in one piece.
`tools.ToolFormat` documents what this module offers.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/ (zero-shot function calling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import listed_calls
from tureen.text.messages import Tool
from tureen.text.python_calls import PythonCallParser, python_tag

ORDER = 33
NAMES: tuple[str, ...] = ("pythonic", "llama4_pythonic", "llama4")
BEGIN, END = "<|python_start|>", "<|python_end|>"
MARKS: tuple[str, ...] = (BEGIN, "func_name1(")
SPECIAL = False  # calls are found without the marks, too
VARIES = False

NO_CALL = r"[^\s\[<]|<+[^|<]"
"""Pattern of the beginning of an answer that is no call."""


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> PythonicParser:
    """Makes the parser of one output."""
    return PythonicParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    listed = listed_calls([python_tag(tool) for tool in tools], ", ", parallel=parallel)
    calls = {"type": "tag", "begin": "[", "content": listed, "end": "]"}
    if required:
        return calls
    text = {"type": "sequence", "elements": [{"type": "regex", "pattern": NO_CALL}, {"type": "any_text"}]}
    return {"type": "or", "elements": [calls, text]}


class PythonicParser(PythonCallParser):
    """Reads a list of calls that is the whole answer."""

    END = END

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._read = self._start

    def _start(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        if first and self._pass_mark(BEGIN, self._raw, is_end) is False:
            self._pass_space(self._raw)
            self._read = self._list

    def _prose(self, is_end: bool) -> None:
        """State: text outside of calls, which is text to the end: calls only begin an answer."""
        self._text(self._rest[self._at :])
        self._at = len(self._rest)
