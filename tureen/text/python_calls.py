"""Shared by the parsers of calls in Python, `name(a=1, b='x')`: a call is read, in one piece, when it is complete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.brackets import PYTHON, Brackets
from tureen.text.call_parser import CallParser, json_text
from tureen.text.call_tags import call_tag
from tureen.text.messages import Tool
from tureen.text.python_literals import keyword_arguments

HEAD = re.compile(r"\s{0,16}([A-Za-z0-9_.-]{1,64})\s{0,16}")
MAX_HEAD_CHARS = 100


def python_tag(tool: Tool) -> dict[str, Any]:
    """Returns the tag of one call with its arguments as `**{…}`: a JSON object, which a schema can constrain."""
    return call_tag(f"{tool.name}(**", tool, ")")


class PythonCallParser(CallParser):
    """Reads a list of calls."""

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._name = ""

    def _list(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        if first == "[":
            self._pass(1, self._raw)
            self._begin_item()
        elif first:
            self._give_up()

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
