"""The parts that parsers of calls with their arguments in tags share: `<parameter=city>Oslo</parameter>`."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tureen.text.call_parser import CallParser, json_text
from tureen.text.marks import overlap
from tureen.text.messages import Tool
from tureen.text.python_literals import keyword_arguments

if TYPE_CHECKING:
    import regex

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
EVERY_TYPE = frozenset((*TYPES.values(), "null"))
MAX_TAG_CHARS = 600
MAX_LOOKS = 2_000  # at members of enumerations, to find a value's types
SCHEMA_COST = 20  # of them: a schema is looked into


class TaggedParser(CallParser):
    """A call begins with a tag that has its name, and its arguments stand in tags; a value comes when it is complete.

    A value that may be no string by the tool's schema is read as JSON, and is a string if it is none.
    """

    CALL: str  # a pattern of the tag of a call; its first group is the name
    CALL_END = ""
    BLOCK_END = ""  # of the mark that calls stand behind
    ARGUMENT: str  # of an argument's tag: its key, and `true` or `false` where it says whether it is a string
    ARGUMENT_END = ""
    IS_WRAPPED = False  # a line break before and behind a value is none of it

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        super().__init__(tools, parallel=parallel)
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._name = ""
        self._num_arguments = 0
        self._key = ""
        self._types = EVERY_TYPE
        self._value: list[str] = []
        self._types_of: dict[tuple[str, str | None], frozenset[str]] = {}  # by tool and property
        self._is_begun = False  # a call is

    def _opening(self, is_end: bool) -> None:
        self._pass_space(self._raw)
        match = self._tag(self.CALL, is_end)
        if match is None:
            return
        self._name = match[1]
        if self._name not in self._tools:
            self._give_up()
            return
        self._begin_call(self._name)
        self._is_begun = True
        self._add_arguments("{")
        self._num_arguments = 0
        self._read = self._arguments_in_tags

    def _tag(self, pattern: str, is_end: bool) -> regex.Match[str] | None:
        """Passes a tag; None where it is not complete, or is no such tag and was given up."""
        match = _compiled(pattern).match(self._rest, self._at, self._at + MAX_TAG_CHARS, partial=not is_end)
        if match is None:
            self._give_up()
        elif not match.partial:
            self._pass(match.end() - self._at, self._raw)
            return match
        elif match.end() - self._at == MAX_TAG_CHARS:
            self._give_up()
        return None

    def _arguments_in_tags(self, is_end: bool) -> None:
        first = self._pass_space([])
        if not first:
            return
        is_over = self._pass_mark(self.CALL_END, [], is_end)
        if is_over or (self.BLOCK_END and self._rest.startswith(self.BLOCK_END, self._at)):
            self._close_call()
        elif is_over is False:
            match = self._tag(self.ARGUMENT, is_end)
            self._raw.clear()
            if match is not None:
                self._begin_value(match)

    def _give_up(self) -> None:
        """Closes the call that is begun, as far as it was read; else makes Content of what is none."""
        end = self._close_call if self._is_begun else super()._give_up
        end()

    def _close_call(self) -> None:
        self._is_begun = False
        self._add_arguments("}")
        self._end_call()

    def _known_types(self, key: str) -> frozenset[str]:
        properties = self._schemas[self._name].get("properties")
        place = self._name, key if isinstance(properties, dict) and key in properties else None
        known = self._types_of.get(place)
        if known is None:
            known = self._types_of[place] = types_of(self._schemas[self._name], key)
        return known

    def _begin_value(self, match: regex.Match[str]) -> None:
        self._key = match[1]
        is_string = match[2] if match.re.groups > 1 else None
        known = self._known_types(self._key)
        self._types = known if is_string is None else STRING if is_string == "true" else EVERY_TYPE - STRING
        self._read = self._in_value

    def _in_value(self, is_end: bool) -> None:
        end = self._rest.find(self.ARGUMENT_END, self._at)
        if end >= 0:
            self._pass(end - self._at, self._value)
            self._at += len(self.ARGUMENT_END)
            self._add_argument(argument_text(self._unwrapped("".join(self._value)), self._types))
            self._value.clear()
            self._read = self._arguments_in_tags
            return
        tail = self._rest[max(self._at, len(self._rest) - len(self.ARGUMENT_END)) :]
        length = len(self._rest) - self._at - (0 if is_end else overlap(tail, self.ARGUMENT_END))
        self._pass(length, self._value)
        if is_end and any(self._value):  # the answer was cut
            written = json_text("".join(self._value).removeprefix("\n" if self.IS_WRAPPED else ""))
            self._add_argument(written[:-1])
            self._value.clear()

    def _add_argument(self, value: str) -> None:
        separator = ", " if self._num_arguments else ""
        self._add_arguments(f"{separator}{json_text(self._key)}: {value}")
        self._num_arguments += 1

    def _unwrapped(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.IS_WRAPPED else value

    def _after(self, is_end: bool) -> None:
        """After a call: the end of its block, or another call in it."""
        first = self._pass_space(self._space)
        if not first:
            return
        if not self.BLOCK_END:
            self._read = self._prose
            return
        is_over = self._pass_mark(self.BLOCK_END, [], is_end)
        if is_over:
            self._read = self._prose
        elif is_over is False:
            self._read = self._opening


STRING = frozenset(("string",))


def types_of(parameters: dict[str, Any], key: str) -> frozenset[str]:
    """Returns the JSON types that an argument may have by the schema of its tool, as far as that is plain to see."""
    return _member_types(parameters, key, parameters, [MAX_LOOKS])


def _member_types(schema: Any, key: str, root: dict[str, Any], left: list[int]) -> frozenset[str]:
    """Returns the types of the member `key` of what an object's schema describes."""
    left[0] -= SCHEMA_COST
    if not isinstance(schema, dict) or left[0] < 0:
        return EVERY_TYPE
    types = EVERY_TYPE
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, dict) and key in properties:
        types = _types(properties[key], root, left)
    elif isinstance(patterns, dict) and patterns:  # any of them may be the one that matches
        others = (*patterns.values(), schema.get("additionalProperties"))
        types = frozenset().union(*(_types(other, root, left) for other in others if other is not False))
    elif "additionalProperties" in schema:
        types = _types(schema["additionalProperties"], root, left)
    return types & _combined(schema, root, left, lambda part: _member_types(part, key, root, left))


def _types(schema: Any, root: dict[str, Any], left: list[int]) -> frozenset[str]:
    left[0] -= SCHEMA_COST
    if not isinstance(schema, dict) or left[0] < 0:
        return EVERY_TYPE
    types = EVERY_TYPE
    if (named := schema.get("type")) is not None:
        types = frozenset(name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        left[0] -= len(values)
        if left[0] < 0:
            return EVERY_TYPE
        types &= frozenset().union(*map(_type, values))
    return types & _combined(schema, root, left, lambda part: _types(part, root, left))


def _combined(
    schema: dict[str, Any], root: dict[str, Any], left: list[int], types_in: Callable[[Any], frozenset[str]]
) -> frozenset[str]:
    """Returns the types that the schemas within a schema allow together; `types_in`: those that one of them allows."""
    types = EVERY_TYPE
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options and left[0] > 0:
            types &= frozenset().union(*map(types_in, options)) if len(options) <= left[0] else EVERY_TYPE
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if left[0] < 0:
            break
        types &= types_in(part)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        types &= types_in(_referred(root, reference))
    return types


def _referred(root: dict[str, Any], reference: str) -> Any:
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


def argument_text(value: str, types: frozenset[str]) -> str:
    """Returns the JSON text of an argument that was written without its quotes."""
    if types == STRING:
        return json_text(value)
    try:
        read = json.loads(value)
        if "string" not in types or _type(read) & types:
            return json_text(read)
    except (ValueError, RecursionError):
        pass
    if "string" not in types:
        try:
            return json_text(next(iter(keyword_arguments(f"value={value.strip()}").values())))
        except (ValueError, RecursionError, StopIteration):
            pass
    return json_text(value)


def _type(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset(("null",))
    name = TYPES[type(value)]
    is_whole = isinstance(value, float) and value.is_integer()
    return frozenset((name, *(("number",) if name == "integer" else ("integer",) if is_whole else ())))


@functools.cache
def _compiled(pattern: str) -> regex.Pattern[str]:
    """Compiles a pattern with the package that can match a part of a text. Only models with such tags need it."""
    compiled: regex.Pattern[str] = importlib.import_module("regex").compile(pattern)
    return compiled
