"""Parsers of calls that are a name between marks, and an object of JSON."""

from __future__ import annotations

import re

from tureen.text.call_parser import CallParser


class NamedParser(CallParser):
    """Reads what stands between the mark and the object, and what ends a call."""

    NAMED: re.Pattern[str]
    """The text that comes before the arguments, up to their first brace; its first group is the name."""

    ENDS: tuple[str, ...] = ()  # what may follow a call and is no text
    NEXT = ""  # where another call begins behind one

    def _opening(self, is_end: bool) -> None:
        if self._pass_space(self._raw):
            self._read = self._named

    def _named(self, is_end: bool) -> None:
        self._pass_name(self.NAMED, is_end)

    def _after(self, is_end: bool) -> None:
        if not self._pass_space(self._space) and not is_end:
            return
        is_next = self._pass_mark(self.NEXT, self._raw, is_end)
        if is_next:
            self._read = self._named
            return
        is_open = is_next is None
        for mark in self.ENDS:
            has_ended = self._pass_mark(mark, [], is_end)
            if has_ended:
                return  # another mark may follow
            is_open = is_open or has_ended is None
        if not is_open:
            self._read = self._prose
