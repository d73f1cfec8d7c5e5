"""EBNF as llama.cpp and XGrammar write it (GBNF: `root ::= "a" | [0-9]+`) to a language."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from tureen.errors import echo
from tureen.grammar import regex
from tureen.grammar.char_sets import complement, union
from tureen.grammar.expression import (
    ANY_CHAR,
    MAX_CODE_POINT,
    SURROGATES,
    Chars,
    Choice,
    Expression,
    GrammarError,
    Language,
    Repeat,
    RuleCall,
    Text,
)
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.regular import is_empty
from tureen.grammar.rules import chain
from tureen.grammar.written_rules import WrittenRules, begin_rule, fault, language_of_rules

ROOT = "root"
MAX_NESTING = 20  # parentheses in each other
MAX_TIMES = 2_000  # in {n,m}

TOKEN = re.compile(
    r"""(?P<space>[\ \t\r\n]+|\#[^\n]*)
    | (?P<define>::=)
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<literal>"(?:[^"\\\n]|\\[^\n])*")
    | (?P<chars>\[(?:[^\]\\\n]|\\[^\n])*\])
    | (?P<regex>/(?:[^/\\\n]|\\[^\n])+/)
    | (?P<times>\{[^}\n]*\}|[*+?])
    | (?P<open>\((?!=))
    | (?P<sign>[|).])""",
    re.VERBOSE,
)
TIMES = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
SHORT_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "b": "\b",
    "a": "\a",
    "e": "\x1b",
    "0": "\0",
} | {sign: sign for sign in "\\\"'?/[]^-"}

HINTS = (
    ("(=", "lookaheads are not supported"),
    ("<", "token references <…> are not supported; write the token's text as a literal"),
    ("!", "token references <…> are not supported; write the token's text as a literal"),
    ("'", 'write literals in double quotes: "…"'),
    ('"', 'the literal is not closed on its line; end it with " and write a line break as \\n'),
    ("[", "the character class is not closed on its line; end it with ]"),
    ("]", "there is not a character class to close; in a literal, put it in double quotes"),
    ("/", "the regular expression is not closed on its line; end it with /"),
    ("{", "the number of times is not closed on its line; end it with }"),
    (":", "write a rule as name ::= …"),
    ("=", "write a rule as name ::= …"),
    (";", "rules have no end sign; remove it"),
    (",", "items follow each other without a comma; instead of TagDispatch(…) send a structural_tag"),
)


@dataclass(frozen=True, slots=True)
class Token:
    """A word of the notation and where it stands."""

    kind: str
    text: str
    line: int  # from 1
    starts_line: bool
    touches_name: bool


@dataclass(slots=True)
class OpenGroup:
    """Alternatives that are being read."""

    line: int
    alternatives: list[Expression] = field(default_factory=list)
    items: list[Expression] = field(default_factory=list)
    repeatable: bool = False  # the last item has no *, + … yet

    def end_alternative(self) -> None:
        self.alternatives.append(chain(self.items))
        self.items = []
        self.repeatable = False

    def close(self) -> Expression:
        self.end_alternative()
        return self.alternatives[0] if len(self.alternatives) == 1 else Choice(tuple(self.alternatives))


def ebnf(text: str, flavour: PythonFlavour = "python-ascii") -> Language:
    """Returns the language of `root`, without Terminals. Raises GrammarError.

    A rule without recursion becomes one regular expression, if it is not too large.
    """
    return language_of_rules(_Parser(text, flavour).read(), ROOT, " ::=")


class _Parser:
    def __init__(self, text: str, flavour: PythonFlavour) -> None:
        self._flavour = flavour
        self._tokens = _tokens(text)
        self._grammar = WrittenRules()
        self._name = ""
        self._groups: list[OpenGroup] = []

    def read(self) -> WrittenRules:
        at = 0
        while at < len(self._tokens):
            token = self._tokens[at]
            if token.kind == "name" and at + 1 < len(self._tokens) and self._tokens[at + 1].kind == "define":
                self._define(token)
                at += 2
                continue
            if not self._groups:
                raise fault(f"{echo(token.text)} is before the first rule", token.line, "write name ::= …")
            self._item(token)
            at += 1
        self._finish_rule()
        return self._grammar

    def _define(self, token: Token) -> None:
        if not token.starts_line:
            raise fault(f"rule {echo(token.text)} starts within a line", token.line, "start it on a new line")
        self._finish_rule()
        begin_rule(self._grammar, token.text, token.line, "rule ")
        self._name = token.text
        self._groups = [OpenGroup(token.line)]

    def _finish_rule(self) -> None:
        if not self._groups:
            return
        if len(self._groups) > 1:
            raise self._fault("a parenthesis is not closed", self._groups[-1].line, "add )")
        self._grammar.rules[self._name] = self._groups.pop().close()

    def _item(self, token: Token) -> None:
        group = self._groups[-1]
        if token.kind == "open":
            self._open(token)
        elif token.text == "|" and token.kind == "sign":
            group.end_alternative()
        elif token.text == ")" and token.kind == "sign":
            self._close(token)
        elif token.kind == "times":
            self._repeat(group, token)
        else:
            group.items.append(self._single(token))
            group.repeatable = True

    def _open(self, token: Token) -> None:
        if len(self._groups) > MAX_NESTING:
            raise self._fault(
                f"parentheses are nested more than {MAX_NESTING} deep", token.line, "make rules of the inner groups"
            )
        self._groups.append(OpenGroup(token.line))

    def _close(self, token: Token) -> None:
        if len(self._groups) == 1:
            raise self._fault("')' closes nothing", token.line, "remove it")
        item = self._groups.pop().close()
        self._groups[-1].items.append(item)
        self._groups[-1].repeatable = True

    def _repeat(self, group: OpenGroup, token: Token) -> None:
        if not group.items:
            raise self._fault(f"nothing is before {echo(token.text)}", token.line, "put what is repeated before it")
        if not group.repeatable:
            raise self._fault(
                f"{echo(token.text)} follows another repetition", token.line, "put parentheses around what is repeated"
            )
        least, most = self._times(token)
        group.items[-1] = Repeat(group.items[-1], least, most)
        group.repeatable = False

    def _times(self, token: Token) -> tuple[int, int | None]:
        if token.text in "*+?":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text]
        match = TIMES.fullmatch(token.text)
        if match is None:
            raise self._fault(f"{echo(token.text)} is not a number of times", token.line, "write {n}, {n,} or {n,m}")
        least = int(match[1])
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if most is not None and most < least:
            raise self._fault(f"{echo(token.text)} is never possible", token.line, "write the smaller number first")
        if max(least, most or 0) > MAX_TIMES:
            raise self._fault(f"{echo(token.text)} is too large", token.line, f"at most {MAX_TIMES}")
        return least, most

    def _single(self, token: Token) -> Expression:
        if token.kind == "literal":
            return Text("".join(self._characters(token)))
        if token.kind == "chars":
            return self._char_class(token)
        if token.kind == "regex":
            return self._regex(token)
        if token.text == ".":
            if token.touches_name:
                raise self._fault(
                    "'.' touches a name", token.line, "'.' is any character; put spaces around it; names have no '.'"
                )
            return ANY_CHAR
        if token.kind == "name":
            self._grammar.calls.setdefault(token.text, (self._name, token.line))
            return RuleCall(token.text)
        raise self._fault(f"{echo(token.text)} is not expected", token.line, "write a rule as name ::= …")

    def _regex(self, token: Token) -> Expression:
        try:
            expression = regex.parse(token.text[1:-1].replace("\\/", "/"), flavour=self._flavour)
            if not is_empty(expression):
                return expression
        except GrammarError as error:
            raise self._fault(f"the regular expression is refused: {error}", token.line) from None
        raise self._fault("the regular expression matches nothing", token.line, "change or remove it")

    def _characters(self, token: Token) -> list[str]:
        """Returns the characters of a literal or character class, between its signs."""
        return [character for character, _ in self._units(token)]

    def _units(self, token: Token) -> list[tuple[str, bool]]:
        """The characters of a literal or character class, and whether each was escaped."""
        units: list[tuple[str, bool]] = []
        text, at = token.text[1:-1], 0
        while at < len(text):
            if text[at] != "\\":
                units.append((text[at], False))
                at += 1
                continue
            match = ESCAPE.match(text, at)
            units.append((self._unescaped(match, text[at : at + 2], token), True))
            at = match.end() if match else len(text)
        return units

    def _unescaped(self, match: re.Match[str] | None, written: str, token: Token) -> str:
        if match is None:
            raise self._fault(f"{echo(written)} is not complete", token.line, "write the escape in full")
        digits = match[1] or match[2] or match[3]
        if digits is None:
            if match[4] not in SHORT_ESCAPES:
                raise self._fault(f"the escape {echo(written)} is not known", token.line, _escape_hint(match[4]))
            return SHORT_ESCAPES[match[4]]
        code = int(digits, 16)
        if code > MAX_CODE_POINT or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self._fault(f"{echo(match[0])} is not a character", token.line, "write a Unicode code point")
        return chr(code)

    def _char_class(self, token: Token) -> Expression:
        units = self._units(token)
        negated = bool(units) and units[0] == ("^", False)
        units = units[negated:]
        if not units:
            raise self._fault("a character class is empty", token.line, "put characters into it; any character is .")
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(units):
            first = last = ord(units[at][0])
            if at + 2 < len(units) and units[at + 1] == ("-", False):
                last = ord(units[at + 2][0])
                at += 2
            if last < first:
                raise self._fault(f"{chr(first)}-{chr(last)} is not a range", token.line, "write the smaller one first")
            ranges.append((first, last))
            at += 1
        chars = Chars(complement(tuple(ranges)) if negated else union(ranges))
        if not chars.ranges:
            raise self._fault("a character class matches nothing", token.line, "any character is .")
        return chars

    def _fault(self, what: str, line: int, fix: str = "") -> GrammarError:
        return fault(f"rule {echo(self._name)}: {what}", line, fix)


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    breaks = [at for at, character in enumerate(text) if character == "\n"]
    at = 0
    starts_line = True
    while at < len(text):
        match = TOKEN.match(text, at)
        line = bisect_right(breaks, at - 1) + 1
        if match is None or match.lastgroup is None:
            raise _unexpected(text, at, line)
        if match.lastgroup == "space":
            starts_line = starts_line or "\n" in match[0]
        else:
            end = match.end()
            touches = _is_name(text[at - 1 : at]) or _is_name(text[end : end + 1])
            tokens.append(Token(match.lastgroup, match[0], line, starts_line, touches))
            starts_line = False
        at = match.end()
    return tokens


def _is_name(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character in ("-", "_"))


def _unexpected(text: str, at: int, line: int) -> GrammarError:
    for sign, hint in HINTS:
        if text.startswith(sign, at):
            return fault(f"{echo(sign)} is not expected", line, hint)
    return fault(f"{echo(text[at])} is not expected", line, "write literal text in double quotes")


def _escape_hint(letter: str) -> str:
    hints = {"d": "[0-9]", "w": "[A-Za-z0-9_]", "s": "[ \\t\\n\\r]"}
    if letter in hints:
        return f"write {hints[letter]}"
    if letter in ("x", "u", "U"):
        return "write \\xhh, \\uhhhh or \\Uhhhhhhhh with hexadecimal digits"
    return 'allowed are \\n \\r \\t \\\\ \\" \\] \\- \\^ \\xhh \\uhhhh \\Uhhhhhhhh'
