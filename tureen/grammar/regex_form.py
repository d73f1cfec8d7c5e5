"""Whether a common reader of patterns takes one: ECMA-262 with its Annex B, or Python's `re`. Groups of PCRE are not
called malformed: real schemas have flags in mid-pattern and calls of groups."""

from __future__ import annotations

import re
import warnings

from tureen.errors import echo

TOKEN = re.compile(
    r"""\\k(?P<called><[^>]{0,1000}>)? | (?P<edge>\\[bB]|[\^$]) | \\.
    | \[\^?(?P<class>(?:\\.|[^\]\\])*)\]
    | (?P<open>\((?:\?(?:[:=!]|<[=!]|<(?P<name>[^>]{0,1000})>)|(?!\?)))
    | \(\?(?:[imsxaLuUJn]*(?:-[imsx]*)?\)|\#[^)]*\))
    | (?P<dialect>\(\?(?:[imsxaLuUJn]*(?:-[imsx]*)?:|[R0-9+&>|']|-[0-9]|P[<>]))
    | (?P<foreign>\(\?.?.?)
    | (?P<close>\)) | (?P<bar>\|)
    | (?P<repeat>(?:[*+?]|\{(?P<low>[0-9]+)(?:,(?P<high>[0-9]*))?\})\??)
    | .""",
    re.DOTALL | re.VERBOSE,
)
RANGE = re.compile(r"(\\.|[^\\])-(\\.|[^\\])|\\.|.", re.DOTALL)


def is_of_python(pattern: str) -> bool:
    """Returns whether Python's `re` compiles the pattern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(pattern)
        except (re.error, ValueError, RecursionError, OverflowError, MemoryError):
            return False
    return True


def fault_in_ecma(pattern: str) -> tuple[str, int] | None:
    """Returns what ECMA-262 does not take even without the flag u, and its position. Checks groups and their names,
    repeats and ranges of classes, whether tureen supports the rest or not."""
    names: set[str] = set()
    called: list[tuple[str, int]] = []
    repeatable: list[bool] = []  # by open group: whether it may be repeated
    can_repeat = False  # what comes before
    for match in TOKEN.finditer(pattern):
        at = match.start()
        fault = _fault_of(match, names, can_repeat)
        if fault is not None:
            return fault, at
        if match[0].startswith("\\k"):
            called.append(((match["called"] or "")[1:-1], at))
        if match["dialect"]:
            repeatable.append(True)
        elif match["open"]:
            repeatable.append(not match["open"].startswith(("(?<=", "(?<!")))
        can_repeat = not any(match[kind] for kind in ("edge", "open", "dialect", "bar", "repeat"))
        if match["close"] and repeatable:
            can_repeat = repeatable.pop()
    missing = [(name, at) for name, at in called if names and name not in names]
    return (f"no group has the name {echo(missing[0][0])}", missing[0][1]) if missing else None


def _fault_of(match: re.Match[str], names: set[str], can_repeat: bool) -> str | None:
    if match["foreign"]:
        return "no such group in ECMA-262 or Python"
    if match["name"] is not None:
        name = match["name"]
        is_twice = name in names
        names.add(name)
        if is_twice:
            return f"two groups have the name {echo(name)}: use each name once"
        is_name = "\\" in name or name.replace("$", "_").isidentifier()  # escapes are not read here
        return None if is_name else f"{echo(name)} is not a valid name of a group"
    if match["repeat"] and not can_repeat:
        return "there is nothing to repeat"
    if match["high"] and _size(match["high"]) < _size(match["low"]):
        return "the counts of the repeat are reversed"
    return "the range of the class is reversed" if match["class"] and _is_reversed(match["class"]) else None


def _size(digits: str) -> tuple[int, str]:
    """Orders numbers of any length."""
    significant = digits.lstrip("0")
    return len(significant), significant


def _is_reversed(text: str) -> bool:
    ends = [(match[1], match[2]) for match in RANGE.finditer(text) if match[1]]
    return any(len(first) == len(last) == 1 and first > last for first, last in ends)
