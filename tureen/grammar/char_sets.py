"""Sets of characters: their algebra, and those that patterns name. Unicode tables are made when first used.

Python's sets are read off `re` itself, ECMA-262's are written down or are general categories of Unicode.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Iterable
from functools import cache

import regex

from tureen.grammar.alphabet import Ranges, merged
from tureen.grammar.expression import ANY_CHAR, MAX_CODE_POINT, SURROGATES

NEWLINE: Ranges = ((10, 10),)
ASCII_DIGIT: Ranges = ((48, 57),)
ASCII_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
ASCII_SPACE: Ranges = ((9, 13), (32, 32))
ECMA_LINE_END: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
ECMA_SPACE: Ranges = (
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
BLOCK = 256  # characters looked at together

LONG_CATEGORIES = {
    "Letter": "L",
    "Cased_Letter": "LC",
    "Uppercase_Letter": "Lu",
    "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm",
    "Other_Letter": "Lo",
    "Mark": "M",
    "Combining_Mark": "M",
    "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me",
    "Number": "N",
    "Decimal_Number": "Nd",
    "digit": "Nd",
    "Letter_Number": "Nl",
    "Other_Number": "No",
    "Punctuation": "P",
    "punct": "P",
    "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po",
    "Symbol": "S",
    "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk",
    "Other_Symbol": "So",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp",
    "Other": "C",
    "Control": "Cc",
    "cntrl": "Cc",
    "Format": "Cf",
    "Surrogate": "Cs",
    "Private_Use": "Co",
    "Unassigned": "Cn",
}


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters."""
    gaps, following = [], 0
    for first, last in merged((*ranges, SURROGATES)):
        if first > following:
            gaps.append((following, first - 1))
        following = last + 1
    if following <= MAX_CODE_POINT:
        gaps.append((following, MAX_CODE_POINT))
    return tuple(gaps)


def union(sets: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the characters of these ranges, which may overlap, without surrogates."""
    joined = merged(sets)
    if any(first <= SURROGATES[1] and last >= SURROGATES[0] for first, last in joined):
        return complement(complement(joined))
    return joined


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Returns the characters that are in both."""
    if left == ANY_CHAR.ranges or right == ANY_CHAR.ranges:
        return right if left == ANY_CHAR.ranges else left
    common, at, beside = [], 0, 0
    while at < len(left) and beside < len(right):
        first, last = max(left[at][0], right[beside][0]), min(left[at][1], right[beside][1])
        if first <= last:
            common.append((first, last))
        if left[at][1] < right[beside][1]:
            at += 1
        else:
            beside += 1
    return tuple(common)


@cache
def python_class(letter: str, ascii_only: bool) -> Ranges:
    r"""Returns the characters that `\d`, `\w` or `\s` matches in a str pattern of `re`."""
    if ascii_only:
        return {"d": ASCII_DIGIT, "w": ASCII_WORD, "s": ASCII_SPACE}[letter]
    runs = re.finditer(rf"\{letter}+", _all_characters())
    return tuple((match.start(), match.end() - 1) for match in runs)


@cache
def property_class(written: str) -> Ranges | None:
    r"""Returns the characters that `regex` finds for a property, written as in `\p{Script=Greek}`; None where it knows
    none."""
    try:
        runs = regex.finditer(rf"\{written}+", _all_characters())
    except regex.error:
        return None
    return union((match.start(), match.end() - 1) for match in runs)


def _all_characters() -> str:
    return array("I", range(MAX_CODE_POINT + 1)).tobytes().decode(f"utf-32-{_byte_order()}", "surrogatepass")


def _byte_order() -> str:
    return "le" if array("H", [1]).tobytes()[0] else "be"


@cache
def category(name: str) -> Ranges | None:
    """Returns the characters of a general category, by its short or long name or a short name's first letter."""
    name = LONG_CATEGORIES.get(name, name)
    names = {"LC": ("Lu", "Ll", "Lt")}.get(name) or tuple(key for key in _categories() if key.startswith(name))
    return union(span for key in names for span in _categories()[key]) if names and name else None


@cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    by_category: dict[str, list[tuple[int, int]]] = {}
    previous, start = "", 0
    for point, name in enumerate(map(unicodedata.category, _all_characters())):
        if name != previous:
            by_category.setdefault(previous, []).append((start, point - 1))
            previous, start = name, point
    by_category.setdefault(previous, []).append((start, MAX_CODE_POINT))
    del by_category[""]
    return by_category


@cache
def _cased() -> dict[str, list[str]]:
    """Every character that has another case, with all that may be equal to it where case is ignored."""
    parent: dict[str, str] = {}

    def root(char: str) -> str:
        while parent.setdefault(char, char) != char:
            char = parent[char]
        return char

    text = _all_characters()
    for start in range(0, len(text), BLOCK):
        block = text[start : start + BLOCK]
        if block.lower() != block or block.upper() != block:
            for char in block:
                for other in (char.lower()[0], char.upper()[0]):
                    if other != char:
                        parent[root(char)] = root(other)
    groups: dict[str, list[str]] = {}
    for char in parent:
        groups.setdefault(root(char), []).append(char)
    return {char: groups[root(char)] for char in parent}


@cache
def _caseless() -> Ranges:
    return complement(merged((ord(char), ord(char)) for char in _cased()))


def ignoring_case(ranges: Ranges, flags: int) -> Ranges:
    """Returns the characters that `re` finds for a class of these ranges if case is ignored."""
    if not ranges:
        return ()
    source = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
    is_found = re.compile(f"[{source}]", flags | re.IGNORECASE).fullmatch
    cased = ((ord(char), ord(char)) for char in _cased() if is_found(char))
    return union((*intersection(ranges, _caseless()), *cased))


@cache
def variants(char: str, flags: int) -> Ranges:
    """Returns the characters that `re` takes for this one where case is ignored."""
    is_found = re.compile(re.escape(char), flags | re.IGNORECASE).fullmatch
    return merged((ord(other), ord(other)) for other in _cased().get(char, [char]) if is_found(other))
