"""LFM2: `<|tool_call_start|>[name(a=1, b='x'), other()]<|tool_call_end|>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import listed_calls, triggered_calls
from tureen.text.messages import Tool
from tureen.text.python_calls import PythonCallParser, python_tag

ORDER = 24
NAMES: tuple[str, ...] = ("lfm2",)
BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> Lfm2Parser:
    return Lfm2Parser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains a list of calls between the marks, which may appear anywhere in the text."""
    listed = listed_calls([python_tag(tool) for tool in tools], ", ", parallel=parallel)
    block = {"type": "tag", "begin": f"{BEGIN}[", "content": listed, "end": f"]{END}"}
    return block if required else triggered_calls(BEGIN, [block], parallel=parallel)


class Lfm2Parser(PythonCallParser):
    MARK = BEGIN
    END = END

    def _opening(self, is_end: bool) -> None:
        self._list(is_end)
