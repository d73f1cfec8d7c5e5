"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, one after another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import json_text
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.gemma_literals import QUOTE, gemma_arguments
from tureen.text.marks import overlap
from tureen.text.messages import Tool
from tureen.text.named_parser import NamedParser

ORDER = 28
NAMES: tuple[str, ...] = ("gemma4",)
BEGIN, END = "<|tool_call>", "<tool_call|>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True
BRACKET = re.compile(r'<\|"\|>|<tool_call\|>|[{}\[\]"]')
IN_JSON = re.compile(r'\\[\s\S]|"|<tool_call\|>')


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> Gemma4Parser:
    return Gemma4Parser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains calls, which may appear anywhere in the text, to JSON arguments."""
    tags = [call_tag(f"{BEGIN}call:{tool.name}", tool, END) for tool in tools]
    return listed_calls(tags, "", parallel=parallel) if required else triggered_calls(BEGIN, tags, parallel=parallel)


class Gemma4Parser(NamedParser):
    """Reads a call when it is complete."""

    MARK = BEGIN
    NAMED = re.compile(r"call:\s{0,16}([A-Za-z0-9_.-]{1,64})\s{0,16}\{")
    ENDS = (END,)
    NEXT = BEGIN

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._name = self._quote = ""
        self._depth = 0
        self._arguments_text: list[str] = []

    def _begin_bare_arguments(self, name: str) -> None:
        self._name, self._depth, self._quote = name, 1, ""
        self._arguments_text = ["{"]
        self._read = self._in_arguments

    def _in_arguments(self, is_end: bool) -> None:
        while self._depth:
            if not (self._in_string(is_end) if self._quote else self._at_bracket(is_end)):
                return
        try:
            arguments = json_text(gemma_arguments("".join(self._arguments_text)))
        except (ValueError, RecursionError):
            self._give_up()
            return
        self._begin_call(self._name)
        self._add_arguments(arguments)
        self._end_call()

    def _at_bracket(self, is_end: bool) -> bool:
        """Reads to the next bracket or string. Returns False if more text is needed, or the call ends without one."""
        end = min(self._certain_end(mark, is_end) for mark in (QUOTE, END))
        match = BRACKET.search(self._rest, self._at, end)
        if match is None:
            self._keep(end - self._at)
            return False
        self._keep(match.end() - self._at)
        if match[0] == END:
            self._give_up()
            return False
        if match[0] in (QUOTE, '"'):
            self._quote = match[0]
        else:
            self._depth += 1 if match[0] in "{[" else -1
        return True

    def _in_string(self, is_end: bool) -> bool:
        """Reads to the end of a string. Returns False if more text is needed, or the call ends within the string."""
        if self._quote == QUOTE:
            end = self._rest.find(QUOTE, self._at)
            if end < 0:
                self._keep(self._certain_end(QUOTE, is_end) - self._at)
                return False
            self._keep(end + len(QUOTE) - self._at)
            self._quote = ""
            return True
        match = IN_JSON.search(self._rest, self._at)
        if match is None:
            is_cut = self._rest.endswith("\\", self._at) and not is_end
            self._keep(min(len(self._rest) - is_cut, self._certain_end(END, is_end)) - self._at)
            return False
        self._keep(match.end() - self._at)
        if match[0] == END:
            self._give_up()
            return False
        self._quote = self._quote if match[0][0] == "\\" else ""
        return True

    def _certain_end(self, mark: str, is_end: bool) -> int:
        """Returns the end of the text that cannot begin the mark."""
        tail = self._rest[max(self._at, len(self._rest) - len(mark)) :]
        return len(self._rest) - (0 if is_end else overlap(tail, mark))

    def _keep(self, length: int) -> None:
        self._arguments_text.append(self._rest[self._at : self._at + length])
        self._pass(length, self._raw)
