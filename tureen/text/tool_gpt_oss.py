"""gpt-oss, the harmony format: `<|channel|>commentary to=functions.name …<|message|>{…}<|call|>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import CallParser
from tureen.text.call_tags import call_tag, triggered_calls
from tureen.text.marks import overlap
from tureen.text.messages import Reasoning, Tool

ORDER = 23
NAMES: tuple[str, ...] = ("gpt-oss", "gpt_oss", "openai")
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
ALL_MARKS = (START, CHANNEL, *ENDS)
ANY_MARK = re.compile("|".join(map(re.escape, ALL_MARKS)))
MARKS: tuple[str, ...] = (CHANNEL,)
SPECIAL = True
VARIES = True

MAX_HEADER_CHARS = 400
TO = "to=functions."
HEADER = r"(?: ?<\|channel\|>(?:commentary|analysis))?(?: ?<\|constrain\|>(?:json)?| json)? ?"
"""Pattern of what stands between a function's name and the arguments."""

TO_FUNCTION = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,64})")


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> HarmonyParser:
    return HarmonyParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains one call, which ends the answer; if it is not required, wherever a message is to a function."""
    if not required:
        return triggered_calls(TO, [_addressed(tool) for tool in tools], parallel=False)
    begin = f"{CHANNEL}commentary to=functions.{{}} <|constrain|>json{MESSAGE}"
    return {"type": "or", "elements": [call_tag(begin.format(tool.name), tool, "<|call|>") for tool in tools]}


def _addressed(tool: Tool) -> dict[str, Any]:
    """The call of a tool from its name in a message's header on. Usually its end is a token that ends the answer."""
    tag = call_tag(f"{TO}{tool.name}", tool, "")
    end = {"type": "optional", "content": {"type": "const_string", "value": "<|call|>"}}
    header = {"type": "tag", "begin": "", "content": {"type": "regex", "pattern": HEADER}, "end": MESSAGE}
    return tag | {"content": {"type": "sequence", "elements": [header, tag["content"], end]}}


class HarmonyParser(CallParser):
    """Messages of the channel `analysis` are reasoning, others that call nothing are text."""

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._is_analysis = False
        self._name = ""

    def _prose(self, is_end: bool) -> None:
        """A header, or the text of a message; text before the first header too."""
        next_mark = ANY_MARK.search(self._rest, self._at)
        if next_mark is None:
            tail = self._rest[max(self._at, len(self._rest) - max(map(len, ALL_MARKS))) :]
            end = len(self._rest) - (0 if is_end else max(overlap(tail, mark) for mark in ALL_MARKS))
            self._message(self._rest[self._at : end])
            self._at = end
            return
        at, mark = next_mark.start(), next_mark[0]
        self._message(self._rest[self._at : at])
        self._at = at
        if mark in ENDS:
            self._at += len(mark)
            self._is_analysis = False
        else:
            self._read = self._header

    def _message(self, text: str) -> None:
        if self._is_analysis and text:
            self._parts.append(Reasoning(text))
        elif not self._is_analysis:
            self._text(text)

    def _header(self, is_end: bool) -> None:
        """State: between `<|start|>` or `<|channel|>` and `<|message|>`."""
        end = self._rest.find(MESSAGE, self._at, self._at + MAX_HEADER_CHARS)
        if end < 0:
            if is_end or len(self._rest) - self._at >= MAX_HEADER_CHARS:
                mark = START if self._rest.startswith(START, self._at) else CHANNEL
                self._pass(len(mark), self._raw)
                self._give_up()
            return
        header = self._rest[self._at : end]
        call = TO_FUNCTION.search(header)
        self._at = end + len(MESSAGE)
        self._is_analysis = f"{CHANNEL}analysis" in header
        if call is None or call[1] not in self._tools:
            self._read = self._prose
            return
        self._raw.append(header + MESSAGE)
        self._name = call[1]
        self._read = self._first_brace

    def _first_brace(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        if first == "{":
            self._at += 1
            self._is_analysis = False
            self._begin_bare_arguments(self._name)
        elif first:
            self._give_up()
