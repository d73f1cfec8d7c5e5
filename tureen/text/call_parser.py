"""Shared by the parsers of all tool-call formats: reads the text around calls, and calls written as JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tureen.text.brackets import JSON, Brackets
from tureen.text.marks import overlap
from tureen.text.messages import CallArguments, CallStart, Content, Part, Tool

SPACE = re.compile(r"\s*")
ARGUMENTS = ("arguments", "parameters")
FIRST_KEY = re.compile(r'\{\s{0,16}"(?:name|arguments|parameters|type|id|tool_name|tool_call_id)"')
MAX_FIRST_CHARS = 32
"""Characters after which an object whose first key is not FIRST_KEY is no call."""
MAX_NAMED_CHARS = 200


def json_text(value: Any) -> str:
    """Encodes a value as JSON. Raises ValueError for one that JSON cannot represent."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: as an escape it can be sent
        return json.dumps(value, allow_nan=False)
    return text


class CallParser:
    """A state machine that splits a text, which comes in pieces, into Content and tool calls.

    Each state is a method that reads on from `_at` as far as it can and may set the next state. Text is a call as soon
    as its name is a tool's and its arguments begin; until then it is kept, and becomes Content if it is no call. White
    space around calls is dropped unless more text follows. All work is linear in the length of the text.
    """

    MARK = ""  # text that begins a call
    END = ""  # text that may follow a list of calls
    NAME = "name"  # the key of a call's name

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        self._tools = frozenset(tool.name for tool in tools)
        self._parallel = parallel  # if false, everything after the first call is dropped
        self._num_calls = 0
        self._read: Callable[[bool], None] = self._prose
        self._rest = ""
        self._at = 0
        self._space: list[str] = []  # white space, kept in case text follows
        self._raw: list[str] = []  # text that may be a call
        self._brackets = Brackets(JSON)
        self._early = ""  # arguments that came before their name
        self._parts: list[Part] = []

    def feed(self, text: str) -> list[Part]:
        """Reads a piece of text and returns the parts that are certain now."""
        self._rest += text
        self._go_on(is_end=False)
        return self._taken()

    def close(self) -> list[Part]:
        """Returns the rest; the text has ended."""
        self._go_on(is_end=True)
        self._text("".join(self._raw))
        if not self._num_calls:
            self._parts.append(Content("".join(self._space)))
        return self._taken()

    def _go_on(self, *, is_end: bool) -> None:
        before = None
        while before != (self._read, self._at):
            before = (self._read, self._at)
            self._read(is_end)
        self._rest, self._at = self._rest[self._at :], 0

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [part for part in parts if isinstance(part, CallStart) or part.text]

    def _text(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._parts.append(Content("".join((*self._space, shown))))
            self._space.clear()
        self._space.append(text[len(shown) :])

    def _pass(self, length: int, buffer: list[str]) -> None:
        buffer.append(self._rest[self._at : self._at + length])
        self._at += length

    def _pass_space(self, buffer: list[str]) -> str:
        """Returns the character that follows; "" where none is there yet."""
        match = SPACE.match(self._rest, self._at)
        self._pass(match.end() - self._at if match else 0, buffer)
        return self._rest[self._at : self._at + 1]

    def _pass_mark(self, mark: str, buffer: list[str], is_end: bool) -> bool | None:
        """Returns whether the mark came next, and passes it; None when more text is needed to know."""
        if self._rest.startswith(mark, self._at):
            self._pass(len(mark), buffer)
            return True
        is_open = not is_end and mark.startswith(self._rest[self._at : self._at + len(mark)])
        return None if is_open else False

    def _prose(self, is_end: bool) -> None:
        """State: text outside of calls."""
        start = self._rest.find(self.MARK, self._at)
        if start >= 0:
            self._text(self._rest[self._at : start])
            self._at = start
            self._pass(len(self.MARK), self._raw)
            self._read = self._opening
            return
        tail = self._rest[max(self._at, len(self._rest) - len(self.MARK)) :]
        end = len(self._rest) - (0 if is_end else overlap(tail, self.MARK))
        self._text(self._rest[self._at : end])
        self._at = end

    def _opening(self, is_end: bool) -> None:
        """State: after the mark."""
        first = self._pass_space(self._raw)
        if first == "{":
            self._begin_object()
        elif first:
            self._give_up()

    def _begin_object(self) -> None:
        self._read = self._first_key

    def _first_key(self, is_end: bool) -> None:
        """State: at an object. One whose first key is not a call's, such as an answer in JSON, is not held back."""
        if FIRST_KEY.match(self._rest, self._at):
            self._brackets = Brackets(JSON)
            self._early = ""
            self._read = self._head
        elif is_end or len(self._rest) - self._at >= MAX_FIRST_CHARS:
            self._give_up()

    def _give_up(self) -> None:
        """Makes Content of text that is no call."""
        self._text("".join(self._raw))
        self._raw.clear()
        self._read = self._prose

    def _begin_call(self, name: str) -> None:
        self._raw.clear()
        self._parts.append(CallStart(self._num_calls, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._parts.append(CallArguments(self._num_calls - 1, text))

    def _end_call(self) -> None:
        self._raw.clear()
        self._read = self._after if self._parallel else self._ignored

    def _after(self, is_end: bool) -> None:
        """State: after a call."""
        self._read = self._prose

    def _ending(self, is_end: bool) -> None:
        """State: after a list of calls."""
        self._pass_space(self._space)
        if self._pass_mark(self.END, [], is_end) is not None:
            self._read = self._prose

    def _ignored(self, is_end: bool) -> None:
        self._at = len(self._rest)

    def _step(self) -> str:
        end, bracket = self._brackets.step(self._rest, self._at)
        self._pass(end - self._at, self._raw)
        return bracket

    def _head(self, is_end: bool) -> None:
        """State: in a call's object before its arguments, or before its end when they are missing or a string."""
        bracket = self._step()
        if bracket == "{" and self._brackets.depth == 1:
            return
        if bracket == "{":
            self._begin_arguments(self._brackets.take()[:-1])
        elif bracket == "}":
            call = _decoded(self._brackets.take())
            name, arguments = call.get(self.NAME), _inner(call)
            if name in self._tools and arguments:
                self._begin_call(name)
                self._add_arguments(arguments)
                self._end_call()
            else:
                self._give_up()
        elif bracket:
            self._give_up()

    def _begin_arguments(self, head: str) -> None:
        call = _decoded(head + "0}")
        if not call or list(call)[-1] not in ARGUMENTS:
            self._give_up()
            return
        self._brackets.text.append("{")
        if self.NAME not in call:
            self._read = self._early_arguments
        elif call[self.NAME] in self._tools:
            self._begin_call(call[self.NAME])
            self._read = self._arguments
        else:
            self._give_up()

    def _arguments(self, is_end: bool) -> None:
        """State: in the arguments, which are passed on as they come."""
        bracket = self._step_over(1)
        self._raw.clear()
        self._add_arguments(self._brackets.take())
        if bracket == "!":
            self._end_call()
        elif bracket:
            self._read = self._tail

    def _early_arguments(self, is_end: bool) -> None:
        """State: in arguments that come before the call's name; they are kept."""
        bracket = self._step_over(1)
        if bracket == "!":
            self._give_up()
        elif bracket:
            self._early = self._brackets.take()
            self._read = self._tail

    def _step_over(self, depth: int) -> str:
        """Reads to the bracket that brings the depth down to `depth`, and returns it; "" when it has not come yet."""
        bracket = self._step()
        while bracket not in ("", "!") and self._brackets.depth > depth:
            bracket = self._step()
        return bracket

    def _pass_name(self, pattern: re.Pattern[str], is_end: bool) -> None:
        """Reads what stands before a call's arguments up to their first brace; its first group is the name."""
        most = self._at + MAX_NAMED_CHARS
        brace = self._rest.find("{", self._at, most)
        if brace < 0 and len(self._rest) < most and not is_end:
            return
        match = pattern.match(self._rest, self._at)
        if match is None or match[1] not in self._tools:
            self._give_up()
            return
        self._pass(match.end() - self._at, self._raw)
        self._begin_bare_arguments(match[1])

    def _begin_bare_arguments(self, name: str) -> None:
        """After their first brace."""
        self._begin_call(name)
        self._brackets = Brackets(JSON, opened="{")
        self._brackets.text.append("{")
        self._read = self._bare_arguments

    def _bare_arguments(self, is_end: bool) -> None:
        bracket = self._step_over(0)
        self._raw.clear()
        self._add_arguments(self._brackets.take())
        if bracket:
            self._end_call()

    def _tail(self, is_end: bool) -> None:
        """State: in a call's object after its arguments."""
        bracket = self._step_over(0)
        if not bracket:
            return
        if not self._early:
            if bracket == "!":
                self._text("".join(self._raw))
            self._end_call()
            return
        name = _decoded('{"":0' + self._brackets.take()).get(self.NAME)
        if bracket == "!" or not isinstance(name, str) or name not in self._tools:
            self._give_up()
            return
        self._begin_call(name)
        self._add_arguments(self._early)
        self._end_call()


class ListParser(CallParser):
    """Calls are the items of a list after the mark."""

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._is_list = False

    def _opening(self, is_end: bool) -> None:
        first = self._pass_space(self._raw)
        self._is_list = first == "["
        if self._is_list:
            self._pass(1, self._raw)
            self._read = self._item
        elif first:
            self._read = self._no_list

    def _item(self, is_end: bool) -> None:
        super()._opening(is_end)

    def _no_list(self, is_end: bool) -> None:
        """After the mark, if no list follows: one call."""
        self._item(is_end)

    def _after(self, is_end: bool) -> None:
        if not self._is_list:
            self._read = self._prose
            return
        first = self._pass_space(self._space)
        if first == ",":
            self._pass(1, self._raw)
            self._read = self._item
        elif first == "]":
            self._at += 1
            self._read = self._ending
        elif first:
            self._read = self._prose


def _decoded(text: str) -> dict[str, Any]:
    """Decodes a JSON object; {} when the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _inner(call: dict[str, Any]) -> str:
    """Returns the arguments, as JSON text, of a call without an object of them: {}, or a string's content; "" when
    that is no object either."""
    value = next((call[key] for key in ARGUMENTS if call.get(key) is not None), "{}")
    try:
        inner = json.loads(value) if isinstance(value, str) else None
        return json_text(inner) if isinstance(inner, dict) else ""
    except (ValueError, RecursionError):
        return ""
