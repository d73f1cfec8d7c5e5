"""The strings of `format: regex`: patterns that ECMA-262, with the flag u, and Python's `re` both read.

A set of strings is regular, and the grammar of patterns is not: groups are at most MAX_DEPTH deep, there are no
backreferences, and the two ends of a count or a range are in order by their first digits or by what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from tureen.grammar import regex
from tureen.grammar.expression import NOTHING, Expression, Repeat, Text
from tureen.grammar.schema.digits import chain, choice

MAX_DEPTH = 4
"""The deepest nesting of groups outside a lookahead. It has groups, and groups have it, one level deep."""

SYNTAX = "^$\\.*+?()[]{}|"
APART = "\\]^-"
"""The characters that mean something in a class."""
ASCII = "".join(map(chr, range(0x20, 0x7F)))
SPACE = r"\t\n\r"
BEYOND = r"\u{a0}-\u{d7ff}\u{e000}-\u{10ffff}"
ESCAPES = "dDwWsSfnrtv"
HEX, LOW_D = "[0-9a-fA-F]", "[dD][0-7][0-9a-fA-F]{2}"
EDGES = (0xA0, 0xD0, 0xF0, 0x100, 0x3A0, 0x3C0, 0x420, 0x440, 0x3080, 0x30C0, 0x5000, 0xB000, 0xE000, 0x10000)
"""Between the ends of a range of characters beyond ASCII lies one of these, mostly the middle of an alphabet."""
MARKS = ((" ", "!-,.-Z_-~"), ("!", "#-,.-Z_-~"), ("#-,.\\/", "0-Z_-~"), (":-@", "A-Z_-~"), ("_`", "a-~"), ("{-}", "~"))
"""Ranges that begin with a mark: the characters that one begins with, and those that it ends with."""
LETTERS = ("a", "b-e", "f", "g-m", "n", "o-y", "z")
"""A range of letters begins and ends in two of these, in this order."""


def regex_strings() -> Expression:
    """Returns the patterns as an expression."""
    class_ = _class()
    single = choice((_of(rf"[{_set(SYNTAX, outside=True)}{SPACE}{BEYOND}]"), _escape(""), Text("."), class_))
    count, counts = _counts()
    fixed = Repeat(chain(single, Repeat(count, 0, 1)), 1)  # of one length, as `re` wants it of a lookbehind
    behind = chain(_of(r"\(\?<[=!]"), fixed, Text(")"))
    repeat = Repeat(chain(choice((_of("[*+?]"), counts)), Repeat(Text("?"), 0, 1)), 0, 1)

    def grouped(depth: int, *others: Expression) -> Expression:
        """Patterns with groups in groups, and what else may stand in the outermost level."""
        atoms = [single]
        if depth:
            inner = ahead(0) if depth == MAX_DEPTH else NOTHING
            atoms.append(chain(_of(r"\((?:\?:)?"), grouped(depth - 1, inner), Text(")")))
        return Repeat(choice((chain(choice(atoms), repeat), _of(r"[\^$]|\\[bB]"), Text("|"), *others)))

    def ahead(depth: int) -> Expression:
        return chain(_of(r"\(\?[=!]"), grouped(depth), Text(")"))

    return grouped(MAX_DEPTH, ahead(1), behind)


def _of(pattern: str) -> Expression:
    return regex.parse(pattern, flavour="ecma")


def _set(chars: str, *, outside: bool = False) -> str:
    """Returns what is between the brackets of a class of these characters, or of all others of ASCII."""
    kept = [char for char in ASCII if char not in chars] if outside else chars
    return "".join(f"\\x{ord(char):02x}" for char in kept)


def _escape(more: str) -> Expression:
    """An escape of one character or of a class of characters; no half of a surrogate pair."""
    code = f"x{HEX}{{2}}|u(?:[0-9a-cA-CefEF]{HEX}{{3}}|{LOW_D})"
    return _of(rf"\\(?:[{ESCAPES}{_set(SYNTAX + '/' + more)}]|{code})")


def _class() -> Expression:
    """A class with something in it: "^" is not first, and "-" is first, last, or after a range."""
    dash = Repeat(Text("-"), 0, 1)
    char = _of(rf"[{_set(APART, outside=True)}{SPACE}{BEYOND}]")
    item = choice((chain(_ranges(), dash), char, _escape("-b")))
    first = choice((item, Text("-")))
    negated = chain(Text("^"), choice((first, Text("^"))))
    return chain(Text("["), choice((first, negated)), Repeat(choice((item, Text("^")))), dash, Text("]"))


def _ranges() -> Expression:
    ranges = [f"[{first}]-[{last}{BEYOND}]" for first, last in MARKS]
    ranges += [f"{digit}-[{digit}-9:-Z_-~{BEYOND}]" for digit in range(10)]
    for at, letters in enumerate(LETTERS):
        last = "".join(LETTERS[at + 1 :])
        ranges += [f"[{letters}]-[{last}{{-~{BEYOND}]", f"[{letters.upper()}]-[{last.upper()}_-~{BEYOND}]"]
    for start, end in pairwise(EDGES):
        before = min(end - 1, 0xD7FF) if start < 0xE000 else end - 1
        after = rf"\u{{{end:x}}}-\u{{d7ff}}\u{{e000}}-\u{{10ffff}}" if end < 0xE000 else rf"\u{{{end:x}}}-\u{{10ffff}}"
        ranges.append(rf"[\u{{{start:x}}}-\u{{{before:x}}}]-[{after}]")
    return choice((_of("|".join(ranges)), _coded_ranges()))


def _coded_ranges() -> Expression:
    r"""`\x20-\x7e`, `\u0400-\u1fff`: the first digits differ, or of \u00… the third ones do; no half of a surrogate
    pair."""
    pairs = []
    for digit in range(16):
        first, last = _hex([digit]), _hex(range(digit + 1, 16))
        for start in ("x", "u00"):
            pairs.append(rf"{start}{first}0-\\{start}{first}{HEX}")
            if digit < 15:
                pairs.append(rf"{start}{first}{HEX}-\\{start}{last}{HEX}")
    for digits in ([0], [1], [2], [3], [4], [5, 6, 7, 8], [9], [10, 11, 12], [14]):
        last = _hex(digit for digit in range(digits[-1] + 1, 16) if digit != 13)
        after = rf"\\u(?:{last}{HEX}{{3}}|{LOW_D})" if digits[-1] < 13 else rf"\\u{last}{HEX}{{3}}"
        pairs.append(rf"u{_hex(digits)}{HEX}{{3}}-{after}")
    return _of(rf"\\(?:{'|'.join(pairs)}|u{LOW_D}-\\u[efEF]{HEX}{{3}})")


def _hex(values: Iterable[int]) -> str:
    return "[" + "".join(f"{value:x}{value:X}" for value in values) + "]"


def _counts() -> tuple[Expression, Expression]:
    """`{3}`, and counts of any form, of at most four digits: the first one is less by its length, or of two digits at
    most, or of three and less by the first."""
    number = "(?:0|[1-9][0-9]{0,3})"
    longer = [f"[1-9][0-9]{{{size}}},[1-9][0-9]{{{size + 1},3}}" for size in range(3)]
    pairs = ["0,[1-9][0-9]{0,3}", *longer, *(f"{digit},[{digit}-9]" for digit in range(10))]
    for digit in range(1, 10):
        pairs += [f"{digit}{low},{digit}[{low}-9]" for low in range(10)]
    for digit in range(1, 9):
        pairs += [f"{digit}{rest},[{digit + 1}-9]{rest}" for rest in ("[0-9]", "[0-9]{2}")]
    return _of(rf"\{{{number}\}}"), _of(rf"\{{(?:{number},?|{'|'.join(pairs)})\}}")
