r"""Writes the patterns of a schema so that the library that judges values reads them as ECMA-262 does.

Its `\b` goes by the letters of all scripts, and its `.` matches every character that ends a line but one; beside a
lookahead or lookbehind its `\w`, `\d` and `\s` go by all scripts, too, and a `[` in a class begins another class.
"""

from __future__ import annotations

import re
from typing import Any

VALUES = ("const", "enum", "default", "example", "examples")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
CHARS = {
    "w": "_0-9A-Za-z",
    "W": "\\x00-/:-@\\[-^`{-\U0010ffff",
    "d": "0-9",
    "D": "\\x00-/:-\U0010ffff",
    "s": "\t-\r\u1680\u2028\u2029\u202f\u205f\u3000\ufeff\u00a0\u2000-\u200a\\x20-\\x20",
    "S": "\\x00-\x08\x0e-\x1f!-\u009f\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e"
    "\u2030-\u205e\u2060-\u2fff\u3001-\ufefe\uff00-\U0010ffff",
}
"""The characters that an escape stands for, as a class has them. All end with a range: a hyphen may follow."""
PARTS = {
    **{f"\\{name}": f"[{chars}]" for name, chars in CHARS.items()},
    r"\b": f"(?:(?<=[{CHARS['w']}])(?![{CHARS['w']}])|(?<![{CHARS['w']}])(?=[{CHARS['w']}]))",
    r"\B": f"(?:(?<=[{CHARS['w']}])(?=[{CHARS['w']}])|(?<![{CHARS['w']}])(?![{CHARS['w']}]))",
    ".": "[^\n\r\u2028\u2029]",
}
IN_CLASSES = {**{f"\\{name}": chars for name, chars in CHARS.items()}, "[": r"\[", "&": r"\&", "~": r"\~"}
PART = re.compile(r"\\[\s\S]|\[\^?(?:\\[\s\S]|[^\]\\])*\]|\.")
"""An escape, a class of characters, or a dot."""
PART_OF_CLASS = re.compile(r"\\[\s\S]|[\[&~]")
CLASS_BEGINS = re.compile(r"\[\^?")


def judged_pattern(pattern: str) -> str:
    """Returns the pattern as the judge has to read it."""
    return PART.sub(_part, pattern)


def _part(part: re.Match[str]) -> str:
    begin = CLASS_BEGINS.match(part[0])
    if begin is None:
        return PARTS.get(part[0], part[0])
    return begin[0] + PART_OF_CLASS.sub(lambda inner: IN_CLASSES.get(inner[0], inner[0]), part[0][begin.end() :])


def with_judged_patterns(schema: Any) -> Any:
    """Returns a copy of a schema, or of a part of one, with its patterns written so; values in it stay as they are."""
    if isinstance(schema, list):
        return [with_judged_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {keyword: _keyword(keyword, value) for keyword, value in schema.items()}


def _keyword(keyword: str, value: Any) -> Any:
    if keyword in VALUES:
        return value
    if keyword == "pattern" and isinstance(value, str):
        return judged_pattern(value)
    if keyword in MAPS and isinstance(value, dict):
        write = judged_pattern if keyword == "patternProperties" else str
        return {write(key): with_judged_patterns(part) for key, part in value.items()}
    return with_judged_patterns(value)
