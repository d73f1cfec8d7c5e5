"""Patterns as text: their parser."""

from __future__ import annotations

import re
from functools import partial

from tureen.errors import echo
from tureen.grammar.char_sets import (
    ASCII_WORD,
    ECMA_LINE_END,
    NEWLINE,
    complement,
    python_class,
    variants,
)
from tureen.grammar.expression import (
    ANY_CHAR,
    EMPTY,
    SURROGATES,
    Chars,
    Expression,
    GrammarError,
    Repeat,
    SchemaError,
    Text,
)
from tureen.grammar.regex_atomic import atomic, possessive
from tureen.grammar.regex_classes import (
    ASCII,
    ASCII_CLASSES,
    IGNORECASE,
    UNCLOSED,
    UNOPENED,
    Flavour,
    PatternSource,
    bracketed,
    check_brackets,
    escape,
)
from tureen.grammar.regex_nodes import (
    ASSERTING,
    Behind,
    Concatenation,
    Guarded,
    Look,
    Mark,
    Node,
    Times,
    alternatives,
    char_set,
    marks,
    sequence,
    unmarked,
    written,
)
from tureen.grammar.transitions import chars

MAX_PATTERN = 64 * 1024  # characters
MAX_DEPTH = 50  # groups in each other
MAX_DIGITS = 9  # of a count
MAX_WRITTEN = 1_000_000  # characters of the pattern with all counted repeats written out

PYTHON_DOT = Chars(complement(NEWLINE))
ECMA_DOT = Chars(complement(ECMA_LINE_END))
DOTALL, MULTILINE, VERBOSE = int(re.DOTALL), int(re.MULTILINE), int(re.VERBOSE)
FLAGS = {"i": IGNORECASE, "s": DOTALL, "m": MULTILINE, "a": ASCII, "u": 0, "x": VERBOSE}
PLAIN = re.compile(r"[^\\.^$*+?()\[\]{}|]+")
PLAIN_VERBOSE = re.compile(r"[^\\.^$*+?()\[\]{}|#\s]+", re.ASCII)
GAP = re.compile(r"(?:[ \t\n\r\f\v]|#[^\n]*)+")
QUANTIFIER = re.compile(r"([*+?])|\{([0-9]*)(,?)([0-9]*)\}")
OPEN_NAMED = re.compile(r"\?(P?)<([^>=!]*)>")
GLOBAL_FLAGS = re.compile(r"\(\?([a-zA-Z]+)()\)")
OPEN_FLAGS = re.compile(r"\?([a-zA-Z]*)(-[a-zA-Z]*)?([:)])")
COMMENT = re.compile(r"\(\?#[^)]*\)")
NEVER = re.compile(r"(?!)")
NOT_REGULAR = {
    "?P=": "backreferences are not supported",
    "?(": "conditional groups are not supported",
}
LOOKAROUNDS: dict[str, tuple[type[Look | Behind], bool]] = {
    "?=": (Look, False),
    "?!": (Look, True),
    "?<=": (Behind, False),
    "?<!": (Behind, True),
}


class PatternParser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, flavour: Flavour) -> None:
        self.source = PatternSource(pattern, flavour)
        self.flags = ASCII_CLASSES if flavour == "python-ascii" else 0
        self.depth = 0
        self.names: set[str] = set()
        self.lazy = 0  # repeats of which the shortest match comes first

    def pattern(self) -> Node:
        """Returns the whole pattern. Raises SchemaError if it is malformed, GrammarError if it is not supported."""
        try:
            return self._pattern()
        except SchemaError:
            raise
        except GrammarError:
            if not self.source.is_python:  # what follows may be malformed
                check_brackets(self.source)
            raise

    def _pattern(self) -> Node:
        if len(self.source.pattern) > MAX_PATTERN:
            self.source.refuse(f"it has {len(self.source.pattern)} characters, at most {MAX_PATTERN} are allowed", 0)
        while self._global_flags():
            pass
        node = self._alternatives()
        if self.source.peek():
            self.source.malformed(UNOPENED)
        if written(node) > MAX_WRITTEN:
            self.source.refuse(f"with its counted repeats written out it has more than {MAX_WRITTEN} characters", 0)
        return node

    def _global_flags(self) -> bool:
        """Read (?flags) or a comment at the beginning of the pattern."""
        start = self.source.at
        if not self.source.is_python:
            return False
        if self.source.match(COMMENT):
            return True
        match = self.source.match(GLOBAL_FLAGS)
        if match:
            self.flags = self._flags(match, start)
        return match is not None

    def _flags(self, match: re.Match[str], start: int) -> int:
        """The flags in force after (?on-off."""
        on, off = match[1], (match[2] or "")[1:]
        both_kinds = "a" in on and "u" in on
        if not set(on) <= set(FLAGS) or not set(off) <= set("imsx") or set(on) & set(off) or both_kinds:
            self.source.refuse(f"(?{match[1]}{match[2] or ''}: no such flags", start)
        flags = self.flags & ~(ASCII | ASCII_CLASSES) if "u" in on else self.flags
        for letter in on:
            flags |= FLAGS[letter]
        for letter in off:
            flags &= ~FLAGS[letter]
        return flags

    def _alternatives(self) -> Node:
        branches = [self._branch()]
        while self.source.take("|"):
            branches.append(self._branch())
        return alternatives(branches)

    def _branch(self) -> Node:
        """Reads until the next "|" or ")" of this level, or the end."""
        atoms: list[Node] = []
        repeated = False
        while self._pass_gap() and (char := self.source.peek()) not in "|)":
            start = self.source.at
            if char in "*+?{" and (quantifier := self._quantifier()):
                if not atoms or (isinstance(atoms[-1], Mark) and self.source.pattern[start - 1] != ")"):
                    self.source.malformed("there is nothing to repeat", start)
                if repeated:  # "+" makes it possessive elsewhere
                    refuse = self.source.refuse if char == "+" else self.source.malformed
                    refuse("a repeat is repeated; put it in a group", start)
                atoms[-1] = self._repeated(atoms[-1], *quantifier, start)
                repeated = True
            elif not self.source.match(COMMENT if self.source.is_python else NEVER):
                atoms += self._atoms()
                repeated = False
        return sequence(atoms)

    def _pass_gap(self) -> bool:
        """Read what a verbose pattern leaves out. Whether more follows."""
        if self.flags & VERBOSE:
            self.source.match(GAP)
        return self.source.peek() != ""

    def _quantifier(self) -> tuple[int, int | None] | None:
        """Read one; None where the brace is a character like others."""
        start = self.source.at
        match = self.source.match(QUANTIFIER)
        if not match or match[0] == "{}":
            self.source.at = start
            return None
        letter, low, comma, high = match.groups()
        if letter:
            span: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[letter]
        elif not low and not self.source.is_python:
            self.source.refuse("write {0,n}: ECMA-262 has no {,n}", start)
        elif max(len(low), len(high)) > MAX_DIGITS:
            self.source.refuse(f"the counts of a repeat have at most {MAX_DIGITS} digits", start)
        else:
            least = int(low or 0)
            span = (least, int(high) if high else None if comma else least)
        if span[1] is not None and span[1] < span[0]:
            self.source.malformed("the counts of the repeat are reversed", start)
        return span

    def _repeated(self, item: Node, least: int, most: int | None, start: int) -> Node:
        """Reads whether the repeat is lazy, which changes no language, or possessive."""
        if self.source.take("?"):
            self.lazy += 1
        elif self.source.is_python and self.source.take("+"):
            return possessive(item, least, most, partial(self.source.refuse, at=start))
        return self._times(item, least, most)

    def _times(self, item: Node, least: int, most: int | None) -> Node:
        if not isinstance(item, ASSERTING):
            if most == 0 or item == EMPTY:
                return EMPTY
            return item if least == most == 1 else Repeat(item, least, most)
        whole = unmarked(item)
        if most == 0 or whole == EMPTY:
            return item if least and most != 0 else EMPTY
        if most == 1:
            return item if least else alternatives([item, EMPTY])
        if isinstance(item, Concatenation) and isinstance(look := item.items[0], Look) and len(item.items) == 2:
            repeated = unmarked(item.items[1])
            if char_set(repeated) is not None and marks(look.item) <= {"end", "final", "line end"}:
                return Guarded(look, repeated, least, most)
        return Times(item, least, most)

    def _atoms(self) -> list[Node]:
        """Reads what comes next and is no repeat: a run of characters, of which the last can be repeated, or one
        item."""
        source = self.source
        if match := source.match(PLAIN_VERBOSE if self.flags & VERBOSE else PLAIN):
            return self._literal(match[0])
        char = source.peek()
        source.at += 1
        if char == "(":
            return [self._group()]
        if char == "[":
            return [chars(bracketed(source, self.flags))]
        if char == ".":
            return [self._dot()]
        if char in "^$":
            return [self._anchor(char)]
        if char == "\\":
            return self._escaped()
        return self._literal(char)

    def _literal(self, text: str) -> list[Node]:
        if any(SURROGATES[0] <= ord(char) <= SURROGATES[1] for char in text):
            self.source.refuse("half of a surrogate pair can never be written")
        if self.flags & IGNORECASE:
            return [chars(variants(char, self.flags & ASCII)) for char in text]
        return [Text(text[:-1]), Text(text[-1])] if len(text) > 1 else [Text(text)]

    def _dot(self) -> Expression:
        if self.source.is_python:
            return ANY_CHAR if self.flags & DOTALL else PYTHON_DOT
        return ECMA_DOT

    def _anchor(self, char: str) -> Mark:
        if self.flags & MULTILINE:
            return Mark("line start" if char == "^" else "line end")
        if char == "^":
            return Mark("start")
        return Mark("final" if self.source.is_python else "end")

    def _escaped(self) -> list[Node]:
        source = self.source
        if source.is_python and source.peek() in ("A", "Z"):
            source.at += 1
            return [Mark("start" if source.pattern[source.at - 1] == "A" else "end")]
        if source.peek() in ("b", "B"):
            source.at += 1
            word = python_class("w", bool(self.flags & (ASCII | ASCII_CLASSES))) if source.is_python else ASCII_WORD
            return [Mark("boundary" if source.pattern[source.at - 1] == "b" else "no boundary", word)]
        escaped = escape(source, False, self.flags)
        return self._literal(chr(escaped)) if isinstance(escaped, int) else [chars(escaped)]

    def _group(self) -> Node:
        """The group whose "(" has been read."""
        start, flags = self.source.at - 1, self.flags
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.source.refuse(f"its groups are nested too deep: at most {MAX_DEPTH} in each other", start)
        opening = self._opened(start) if self.source.peek() == "?" else ""
        lazy = self.lazy
        node = self._alternatives()
        if not self.source.take(")"):
            self.source.malformed(UNCLOSED, start)
        self.flags = flags
        self.depth -= 1
        if opening == "?>":
            if self.lazy > lazy:
                self.source.refuse("an atomic group cannot hold a lazy repeat", start)
            return atomic(node, partial(self.source.refuse, at=start))
        if opening in LOOKAROUNDS:
            kind, is_negative = LOOKAROUNDS[opening]
            return kind(node, is_negative)
        return node

    def _opened(self, start: int) -> str:
        """Read what follows the "(" of a group that begins with "?". Returns it for an atomic group or a lookaround."""
        source = self.source
        for prefix, reason in NOT_REGULAR.items():
            if source.pattern.startswith(prefix, source.at):
                source.refuse(reason, start)
        openings: tuple[str, ...] = ("?:", *LOOKAROUNDS, *(("?>",) if source.is_python else ()))
        for opening in openings:
            if source.take(opening):
                return opening
        if (match := source.match(OPEN_NAMED)) and bool(match[1]) == source.is_python:
            name = match[2]
            if not name.replace("$", "" if source.is_python else "_").isidentifier() or name in self.names:
                source.refuse(f"the group name {echo(name)} is used twice or no name", start)
            self.names.add(name)
            return ""
        if source.is_python and not match and (match := source.match(OPEN_FLAGS)):
            if match[3] == ")":
                source.refuse("flags for the whole pattern go at its beginning", start)
            self.flags = self._flags(match, start)
            return ""
        return source.refuse(f"no such group in {'Python' if source.is_python else 'ECMA-262'}", start)
