"""OLMo 3: calls in Python, `name(a=1, b="x")`, on lines between `<function_calls>` and `</function_calls>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tureen.text.call_tags import block_of_calls
from tureen.text.messages import Tool
from tureen.text.python_calls import PythonCallParser, python_tag

ORDER = 25
NAMES: tuple[str, ...] = ("olmo3",)
BEGIN, END = "<function_calls>", "</function_calls>"
MARKS: tuple[str, ...] = (BEGIN,)
SPECIAL = True
VARIES = True


def parser(tools: Sequence[Tool], *, parallel: bool = True) -> Olmo3Parser:
    return Olmo3Parser(tools, parallel=parallel)


def structural_tag(tools: Sequence[Tool], *, required: bool, parallel: bool) -> dict[str, Any]:
    """Constrains the calls between the marks, which may appear anywhere in the text."""
    tags = [python_tag(tool) for tool in tools]
    return block_of_calls(BEGIN, tags, END, required=required, parallel=parallel)


class Olmo3Parser(PythonCallParser):
    MARK = BEGIN

    def _opening(self, is_end: bool) -> None:
        if self._pass_space(self._raw):
            self._begin_item()

    def _after(self, is_end: bool) -> None:
        if not self._pass_space([]):
            return
        is_over = self._pass_mark(END, [], is_end)
        if is_over:
            self._read = self._prose
        elif is_over is False:
            self._begin_item()
