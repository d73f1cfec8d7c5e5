"""The text of a pattern as it is read, its escapes and its character classes, in Python's and in ECMA-262's syntax."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from tureen.errors import echo
from tureen.grammar.alphabet import Ranges
from tureen.grammar.char_sets import (
    ASCII_DIGIT,
    ASCII_WORD,
    ECMA_SPACE,
    category,
    complement,
    ignoring_case,
    property_class,
    python_class,
    union,
)
from tureen.grammar.expression import ANY_CHAR, MAX_CODE_POINT, GrammarError, SchemaError

PythonFlavour: TypeAlias = Literal["python", "python-ascii"]
r"""`python-ascii`: `\d`, `\w`, `\s` and `\b` know ASCII only, unless the pattern says `(?u)`."""
Flavour: TypeAlias = Literal["python", "python-ascii", "ecma"]

IGNORECASE, ASCII = int(re.IGNORECASE), int(re.ASCII)
ASCII_CLASSES = 1 << 16  # a flag of ours: unlike ASCII, it does not change what IGNORECASE does
CONTROL = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
PYTHON_HEX = {"x": 2, "u": 4, "U": 8}
PYTHON_OCTAL = re.compile(r"0[0-7]{0,2}|[1-7][0-7]{2}", re.ASCII)
PYTHON_CLASS_OCTAL = re.compile(r"[0-7]{1,3}", re.ASCII)
PYTHON_NAME = re.compile(r"N\{([^}]+)\}")
ECMA_CODE_POINT = re.compile(r"u\{([0-9A-Fa-f]+)\}")
ECMA_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
ECMA_PAIR = re.compile(r"u([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
ECMA_CONTROL = re.compile(r"c([A-Za-z])")
ECMA_PROPERTY = re.compile(r"([pP])\{(?:(?:gc|General_Category)=)?([A-Za-z_]+)\}")
ECMA_OTHER_PROPERTY = re.compile(r"([pP])\{((?:Script|sc|Script_Extensions|scx)=)?([A-Za-z_]+)\}")
PYTHON_PROPERTY = re.compile(r"([pP])(\{\^?[A-Za-z0-9_ &=:-]{1,64}\}|[A-Za-z])")
BRACKETS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()\[\\]", re.DOTALL)
ECMA_BINARY = frozenset(
    ("Alphabetic", "Lowercase", "Uppercase", "White_Space", "ASCII_Hex_Digit", "Hex_Digit", "ID_Start", "ID_Continue")
)
ECMA_SETS = {"Any": ANY_CHAR.ranges, "ASCII": ((0, 127),)}


UNOPENED = 'there is a ")" without its "("'
UNCLOSED = 'a group is not closed: ")" is missing'
REVERSED = "the range of the class is reversed"
ENDS_IN_CLASS = 'the class is not closed: "]" is missing'
ENDS_IN_ESCAPE = "the backslash at the end escapes nothing"


class PatternSource:
    """A pattern and how far it is read. Positions in messages count characters from 0."""

    def __init__(self, pattern: str, flavour: Flavour) -> None:
        self.pattern = pattern
        self.at = 0
        self.is_python = flavour != "ecma"

    def refuse(self, what: str, at: int | None = None) -> NoReturn:
        """Raises the GrammarError that says what is not supported and where."""
        raise GrammarError(self._told(what, at))

    def malformed(self, what: str, at: int | None = None) -> NoReturn:
        """Raises the SchemaError that says what is wrong, whatever reads the pattern, and where."""
        raise SchemaError(self._told(what, at))

    def _told(self, what: str, at: int | None) -> str:
        return f"pattern {echo(self.pattern)}: {what} (position {self.at if at is None else at})"

    def peek(self) -> str:
        """Returns the next character; "" at the end."""
        return self.pattern[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        """Reads this text if it comes next, and says whether it did."""
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Reads what the pattern matches here, if it does."""
        match = pattern.match(self.pattern, self.at)
        if match:
            self.at = match.end()
        return match


def check_brackets(source: PatternSource) -> None:
    """Checks the brackets and backslashes of a whole ECMA-262 pattern, which may have what is not supported."""
    open_: list[int] = []
    for match in BRACKETS.finditer(source.pattern):
        start, text = match.start(), match[0]
        if text == "(":
            open_.append(start)
        elif text == ")":
            if not open_:
                source.malformed(UNOPENED, start)
            open_.pop()
        elif text in ("[", "\\"):
            source.malformed(ENDS_IN_CLASS if text == "[" else ENDS_IN_ESCAPE, start)
    if open_:
        source.malformed(UNCLOSED, open_[-1])


def escape(source: PatternSource, in_class: bool, flags: int) -> int | Ranges:
    """Reads what follows a backslash: the code point it stands for, or a set of characters. No assertion is known
    here."""
    letter = source.peek()
    if not letter:
        source.malformed(ENDS_IN_ESCAPE)
    if letter in "dws" or letter in "DWS":
        source.at += 1
        return _shorthand(source, letter, flags)
    if letter in CONTROL:
        source.at += 1
        return CONTROL[letter]
    if letter == "b" and in_class:
        source.at += 1
        return 8
    return _python_escape(source, in_class, flags) if source.is_python else _ecma_escape(source)


def _shorthand(source: PatternSource, letter: str, flags: int) -> Ranges:
    if source.is_python:
        ranges = python_class(letter.lower(), bool(flags & (ASCII | ASCII_CLASSES)))
    else:
        ranges = {"d": ASCII_DIGIT, "w": ASCII_WORD, "s": ECMA_SPACE}[letter.lower()]
    return ranges if letter.islower() else complement(ranges)


def _python_escape(source: PatternSource, in_class: bool, flags: int) -> int | Ranges:
    start = source.at
    if match := source.match(PYTHON_PROPERTY):
        if flags & IGNORECASE:
            source.refuse("\\p and \\P are not supported where case is ignored; write both cases of them", start)
        return _property(source, match[0], start)
    if match := source.match(PYTHON_CLASS_OCTAL if in_class else PYTHON_OCTAL):
        value = int(match[0], 8)
        return value if value <= 0o377 else source.refuse("an octal escape is at most \\377", start)
    letter = source.peek()
    if letter in PYTHON_HEX:
        digits = PYTHON_HEX[letter]
        text = source.pattern[start + 1 : start + 1 + digits]
        source.at += 1 + len(text)
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{digits}}}", text) or int(text, 16) > MAX_CODE_POINT:
            source.refuse(f"\\{letter} takes {digits} hexadecimal digits of a code point", start)
        return int(text, 16)
    if named := source.match(PYTHON_NAME):
        try:
            return ord(unicodedata.lookup(named[1]))
        except (KeyError, TypeError):
            source.refuse(f"no character has the name {echo(named[1])}", start)
    if letter == "a":
        source.at += 1
        return 7
    if letter in "123456789":
        source.refuse("backreferences are not supported")
    return _identity(source)


def _ecma_escape(source: PatternSource) -> int | Ranges:
    start = source.at
    if match := source.match(ECMA_PAIR):
        return 0x10000 + ((int(match[1], 16) - 0xD800) << 10) + int(match[2], 16) - 0xDC00
    if match := source.match(ECMA_HEX):
        return int(match[1] or match[2], 16)
    if match := source.match(ECMA_CODE_POINT):
        value = int(match[1][-7:], 16) if match[1][:-7].strip("0") == "" else MAX_CODE_POINT + 1
        return value if value <= MAX_CODE_POINT else source.refuse("no code point is so large", start)
    if match := source.match(ECMA_CONTROL):
        return ord(match[1]) % 32
    if source.peek() in ("p", "P") and (ranges := _ecma_property(source)) is not None:
        return ranges
    if source.peek() in "123456789k":
        source.refuse("backreferences are not supported")
    if source.take("0"):
        return source.refuse("octal escapes are none of ECMA-262's") if source.peek() in tuple("0123456789") else 0
    return _identity(source)


def _ecma_property(source: PatternSource) -> Ranges | None:
    """Reads `p{…}` or `P{…}`; None where nothing of that form comes next."""
    start = source.at
    if match := source.match(ECMA_PROPERTY):
        ranges = ECMA_SETS.get(match[2]) or category(match[2])
        if ranges is not None:
            return ranges if match[1] == "p" else complement(ranges)
        source.at = start
    if match := source.match(ECMA_OTHER_PROPERTY):
        if match[2] or match[3] in ECMA_BINARY:
            return _property(source, f"{match[1]}{{{match[2] or ''}{match[3]}}}", start)
        source.refuse("no such property: supported are general categories, Script=… and common binary ones", start)
    return None


def _property(source: PatternSource, written: str, start: int) -> Ranges:
    ranges = property_class(written)
    if ranges is None:
        source.refuse(f"Unicode has no property \\{written}", start)
    return ranges


def _identity(source: PatternSource) -> int:
    """Any other character stands for itself, if it is no letter or digit."""
    char = source.peek()
    if char.isascii() and char.isalnum():
        flavour = "Python" if source.is_python else "ECMA-262"
        source.refuse(f"{flavour} has no escape \\{char}" + (" in a class" if char in "AZBb" else ""))
    source.at += 1
    return ord(char)


def bracketed(source: PatternSource, flags: int) -> Ranges:
    """Returns the class whose "[" has been read."""
    negated = source.take("^")
    items = [_class_range(source, flags)] if source.is_python and source.peek() == "]" else []
    while not source.take("]"):
        items.append(_class_range(source, flags))
    written = union(span for item in items if not item.is_set for span in item.spans)
    if flags & IGNORECASE:
        written = ignoring_case(written, flags & ASCII)
    ranges = union((*written, *(span for item in items if item.is_set for span in item.spans)))
    return complement(ranges) if negated else ranges


class ClassItem(NamedTuple):
    r"""One character, range or set such as `\w` of a class."""

    spans: Ranges
    is_set: bool = False


def _class_range(source: PatternSource, flags: int) -> ClassItem:
    start = source.at
    first = _class_atom(source, flags)
    if source.peek() != "-" or source.pattern[source.at + 1 : source.at + 2] in ("", "]"):
        return _item(first)
    source.at += 1
    last = _class_atom(source, flags)
    if isinstance(first, int) and isinstance(last, int):
        return ClassItem(((first, last),)) if first <= last else source.malformed(REVERSED, start)
    if source.is_python:
        source.refuse("a range goes from one character to another", start)
    return ClassItem((*_item(first).spans, (ord("-"), ord("-")), *_item(last).spans), is_set=True)


def _class_atom(source: PatternSource, flags: int) -> int | Ranges:
    if source.take("\\"):
        return escape(source, True, flags)
    char = source.peek()
    if not char:
        source.malformed(ENDS_IN_CLASS)
    source.at += 1
    return ord(char)


def _item(atom: int | Ranges) -> ClassItem:
    return ClassItem(((atom, atom),)) if isinstance(atom, int) else ClassItem(atom, is_set=True)
