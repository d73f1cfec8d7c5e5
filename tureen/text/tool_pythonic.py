"""Parses tool calls of Llama 4 and the small Llama 3.2 models: the answer is a list of calls in Python,
`[name(a=1, b='x'), other()]`. A call is read when it is complete, so its arguments come in one piece.
`tools.ToolFormat` documents what this module offers.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/ (zero-shot function calling).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.brackets import PYTHON, Brackets
from tureen.text.call_parser import CallParser, json_text
from tureen.text.call_tags import call_tag, listed_calls
from tureen.text.messages import Tool
from tureen.text.python_literals import keyword_arguments

ORDER = 33
NAMES: tuple[str, ...] = ("pythonic", "llama4_pythonic")
BEGIN, END = "<|python_start|>", "<|python_end|>"
MARKS: tuple[str, ...] = (BEGIN, "func_name1(")
SPECIAL = False  # calls are found without the marks, too
VARIES = False

NO_CALL = r"[^\s\[<]|<+[^|<]"
"""Pattern of the beginning of an answer that is no call."""

HEAD = re.compile(r"\s{0,16}([A-Za-z0-9_.-]{1,64})\s{0,16}")
MAX_HEAD_CHARS = 100


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> CallParser:
    """Makes the parser of one output."""
    return PythonicParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Writes arguments as `**{…}`, so that they are a JSON object, which a schema can constrain."""
    tags = [call_tag(f"{tool.name}(**", tool, ")") for tool in tools]
    listed = listed_calls(tags, ", ", parallel=parallel)
    calls = {"type": "tag", "begin": "[", "content": listed, "end": "]"}
    if required:
        return calls
    text = {"type": "sequence", "elements": [{"type": "regex", "pattern": NO_CALL}, {"type": "any_text"}]}
    return {"type": "or", "elements": [calls, text]}


class PythonicParser(CallParser):
    """Reads a list of calls that is the whole answer."""

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._read = self._start
        self._name = ""

    def _start(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        if first and self._pass_mark(BEGIN, self._raw, is_end) is False:
            self._pass_space(self._raw)
            self._read = self._list

    def _list(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        if first == "[":
            self._pass(1, self._raw)
            self._begin_item()
        elif first:
            self._give_up()

    def _prose(self, is_end: bool) -> None:
        """State: text outside of calls, which is text to the end: calls only begin an answer."""
        self._text(self._rest[self._at :])
        self._at = len(self._rest)

    def _begin_item(self) -> None:
        self._brackets = Brackets(PYTHON)
        self._read = self._item_head

    def _item_head(self, is_end: bool) -> None:
        bracket = self._step()
        head = "".join(self._brackets.text)
        match = HEAD.fullmatch(head.removesuffix("("))
        if bracket == "(" and match is not None and match[1] in self._tools:
            self._name = match[1]
            self._brackets.text.clear()
            self._read = self._item
        elif bracket or len(head) > MAX_HEAD_CHARS or (head.strip() and match is None):
            self._give_up()

    def _item(self, is_end: bool) -> None:
        bracket = self._step_over(0)
        if not bracket:
            return
        try:
            arguments = json_text(keyword_arguments(self._brackets.take()[:-1])) if bracket == ")" else ""
        except ValueError:
            arguments = ""
        if arguments:
            self._begin_call(self._name)
            self._add_arguments(arguments)
            self._end_call()
        else:
            self._give_up()

    def _after(self, is_end: bool) -> None:
        first = self._pass_space(self._space)
        if first == ",":
            self._pass(1, self._raw)
            self._begin_item()
        elif first == "]":
            self._at += 1
            self._read = self._ending
        elif first:
            self._read = self._prose

    def _ending(self, is_end: bool) -> None:
        self._pass_space(self._space)
        if self._pass_mark(END, [], is_end) is not None:
            self._read = self._prose
