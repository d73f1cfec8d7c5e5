"""Apertus: `<|tools_prefix|>[{"name": {…}}, …]<|tools_suffix|>`, an object with one key for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tureen.text.call_parser import ListParser
from tureen.text.call_tags import call_tag, listed_calls, triggered_calls
from tureen.text.messages import Tool

ORDER = 27
NAMES: tuple[str, ...] = ("apertus",)
BEGIN, END = "<|tools_prefix|>", "<|tools_suffix|>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True
NAMED = re.compile(r'\s{0,16}"([A-Za-z0-9_.-]{1,64})"\s{0,16}:\s{0,16}\{')


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> ApertusParser:
    return ApertusParser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains a list of calls between the marks, which may appear anywhere in the text."""
    listed = listed_calls([call_tag(f'{{"{tool.name}": ', tool, "}") for tool in tools], ", ", parallel=parallel)
    block = {"type": "tag", "begin": f"{BEGIN}[", "content": listed, "end": f"]{END}"}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class ApertusParser(ListParser):
    MARK = BEGIN
    END = END

    def _item(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        if first == "{":
            self._pass(1, self._raw)
            self._read = self._named
        elif first:
            self._give_up()

    def _named(self, is_end: bool) -> None:
        """State: in the object of a call, before its name."""
        self._pass_name(NAMED, is_end)

    def _after(self, is_end: bool) -> None:
        first = self._pass_space(self._space)
        if first:
            self._at += 1 if first == "}" else 0
            self._read = super()._after
