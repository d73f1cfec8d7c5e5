"""Grammars in the notation of Lark (`start: "a" | NUMBER`), the part that LLGuidance and XGrammar read too."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tureen.errors import echo
from tureen.grammar import regex
from tureen.grammar.expression import (
    Chars,
    Choice,
    Expression,
    GrammarError,
    Language,
    Repeat,
    RuleCall,
    Text,
)
from tureen.grammar.lark_terminals import COMMON, pattern_terminal
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.regular import is_empty
from tureen.grammar.rules import Rules, calls, chain, cycle, replaced, unmarked
from tureen.grammar.schema.language import json_schema
from tureen.grammar.written_rules import WrittenRules, begin_rule, fault, language_of_rules

START = "start"
SKIP = "%ignore"  # the rule of what may stand between terminals
MAX_NESTING = 20  # parentheses in each other
MAX_TIMES = 2_000

TOKEN = re.compile(
    r"""(?P<space>[\ \t\r\n]+|(?://|\#)[^\n]*)
    | (?P<directive>%[a-z]+)
    | (?P<arrow>->)
    | (?P<span>\.\.)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>[0-9]{1,9})
    | (?P<literal>"(?:[^"\\\n]|\\[^\n])*"i?)
    | (?P<regex>/(?![/*])(?:[^/\\\n]|\\[^\n])+/[a-z]*)
    | (?P<times>\{\s{0,8}[0-9]{0,9}\s{0,8},?\s{0,8}[0-9]{0,9}\s{0,8}\})
    | (?P<sign>[][()|?*+~:.,!])""",
    re.VERBOSE,
)
TIMES = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
RULE = re.compile(r"_?[a-z][a-z0-9_]*")
TERMINAL = re.compile(r"_?[A-Z][A-Z0-9_]*")
ESCAPE = re.compile(r"""\\(?:["'\\/nrtfvab0]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})|[^\\]+""")
SHORT_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0"}
DEFINITION = re.compile(
    r"^[ \t]*[?!]*_?[A-Za-z][A-Za-z0-9_]*(?:\.-?\d+|\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:(?!:=)", re.MULTILINE
)
EBNF_DEFINITION = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)

HINTS = (
    ("<", "special tokens <…> are not supported; write the token's text as a string"),
    ("@", "grammars that are sent apart are not supported; write their rules here"),
    ("&", "the intersection of terminals is not supported"),
    ("'", 'write strings in double quotes: "…"'),
    ('"', 'the string is not closed on its line; end it with " and write a line break as \\n'),
    ("/", "the regular expression is not closed on its line; end it with /"),
    ("{", "templates are not supported; write the rule out for each use"),
    (";", "rules have no end sign; remove it"),
    ("=", "write a rule as name: …"),
)
DIRECTIVES = {
    "%declare": "terminals that are declared only have no text; define them",
    "%override": "nothing that is imported has rules; define the rule under its own name",
    "%extend": "nothing that is imported has rules; add the alternative to the rule itself",
    "%lark": "nested grammars are not supported; write their rules here",
    "%regex": "it is not supported; write a regular expression /…/",
}


@dataclass(frozen=True, slots=True)
class LarkToken:
    """A word of the notation and where it stands. Of `%json` the text is the schema."""

    kind: str
    text: str
    line: int  # from 1
    starts_line: bool


END = LarkToken("end", "", 0, starts_line=True)


def is_lark(text: str) -> bool:
    """Returns whether a grammar is written as Lark's are, `name: …`, and not as llama.cpp's, `name ::= …`."""
    return DEFINITION.search(text) is not None and EBNF_DEFINITION.search(text) is None


def lark(text: str, flavour: PythonFlavour = "python-ascii") -> Language:
    """Returns the language of `start`, without Terminals. Raises GrammarError.

    A text is cut into terminals in any way that fits the rules. What `%ignore` names may follow each of them.
    """
    parser = _LarkParser(text, flavour)
    grammar = parser.read()
    _check_terminals(grammar)
    rules = _with_skips(grammar.rules, parser.ignored) if parser.ignored else grammar.rules
    return language_of_rules(WrittenRules(rules, grammar.lines, grammar.calls), START, ":")


RULE_HINT = "write a rule at the start of a line as name: …, without attributes […]"

Fail = Callable[[str, LarkToken, str], GrammarError]
"""Makes the error for a token: what is wrong with it, and how to mend it."""


class _LarkParser:
    def __init__(self, text: str, flavour: PythonFlavour) -> None:
        self._flavour = flavour
        self._tokens = _tokens(text)
        self._at = 0
        self._name = ""
        self._depth = 0
        self._grammar = WrittenRules()
        self.ignored: list[Expression] = []

    def read(self) -> WrittenRules:
        while self._peek() is not END:
            token = self._peek()
            if token.kind == "directive":
                self._directive()
            elif self._is_definition():
                self._definition()
            else:
                raise fault(f"{echo(token.text)} is not expected", token.line, RULE_HINT)
        return self._grammar

    def _peek(self, ahead: int = 0) -> LarkToken:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else END

    def _take(self) -> LarkToken:
        token = self._peek()
        self._at += 1
        return token

    def _takes(self, sign: str) -> bool:
        if self._peek().kind != "sign" or self._peek().text != sign:
            return False
        self._at += 1
        return True

    def _is_definition(self) -> bool:
        """`name:`, `?name:` or `name.1:` comes next, at the beginning of a line."""
        if not self._peek().starts_line:
            return False
        ahead = 0
        while self._peek(ahead).kind == "sign" and self._peek(ahead).text in "?!":
            ahead += 1
        if self._peek(ahead).kind != "name":
            return False
        after = self._peek(ahead + 1)
        return after.kind == "sign" and (
            after.text == ":" or (after.text == "." and self._peek(ahead + 2).kind == "number")
        )

    def _definition(self) -> None:
        while self._peek().text in ("?", "!"):
            self._at += 1
        token = self._take()
        if self._takes("."):
            raise fault(
                f"{echo(token.text)} has a priority", token.line, "no text has one way to be read only; remove it"
            )
        self._takes(":")
        self._begin(token)
        self._grammar.rules[self._name] = self._alternatives()

    def _begin(self, token: LarkToken) -> None:
        if not RULE.fullmatch(token.text) and not TERMINAL.fullmatch(token.text):
            raise fault(
                f"{echo(token.text)} is no name", token.line, "write rules in small letters, terminals in CAPITALS"
            )
        begin_rule(self._grammar, token.text, token.line)
        self._name = token.text

    def _directive(self) -> None:
        token = self._take()
        if token.text == "%ignore":
            self._name = SKIP
            self.ignored.append(self._alternatives())
        elif token.text == "%import":
            self._import(token)
        elif token.text == "%llguidance" and self._peek().kind == "times" and self._peek().text == "{}":
            self._at += 1
        else:
            why = DIRECTIVES.get(token.text, "allowed are %ignore, %import common.… and %json {…}")
            raise fault(f"{echo(token.text)} is not supported", token.line, why)

    def _import(self, token: LarkToken) -> None:
        library = self._take()
        if library.text != "common":
            raise fault(f"%import of {echo(library.text)}", token.line, "only common is known: %import common.NUMBER")
        if self._takes("."):
            name = self._take().text
            alias = self._take_alias()
            self._define_common(name, alias or name, token.line)
            return
        if not self._takes("("):
            raise fault("%import common", token.line, "name the terminals: %import common.NUMBER")
        while not self._takes(")"):
            if self._peek() is END:
                raise fault("the list of %import is not closed", token.line, "add )")
            name = self._take().text
            self._define_common(name, name, token.line)
            self._takes(",")

    def _define_common(self, name: str, alias: str, line: int) -> None:
        if name not in COMMON:
            raise fault(f"common has no {echo(name)}", line, f"known are {', '.join(COMMON)}")
        self._grammar.lines[alias] = line
        self._grammar.rules[alias] = regex.parse(COMMON[name], flavour="python")

    def _take_alias(self) -> str:
        if self._peek().kind != "arrow":
            return ""
        self._at += 1
        return self._take().text

    def _alternatives(self) -> Expression:
        """Up to a sign that closes, a definition, a directive or the end."""
        alternatives = [self._sequence()]
        while self._takes("|"):
            alternatives.append(self._sequence())
        return alternatives[0] if len(alternatives) == 1 else Choice(tuple(alternatives))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while not self._is_at_end():
            items.append(self._repeated(self._item()))
        self._take_alias()
        return chain(items)

    def _is_at_end(self) -> bool:
        token = self._peek()
        if token is END or token.kind in ("directive", "arrow") or self._is_definition():
            return True
        return token.kind == "sign" and token.text in "|)]"

    def _repeated(self, item: Expression) -> Expression:
        token = self._peek()
        if token.kind == "sign" and token.text in "*+?" and not self._is_definition():
            self._at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text]
        elif token.kind == "times":
            self._at += 1
            least, most = self._braces(token)
        elif self._takes("~"):
            least, most = self._count()
        else:
            return item
        if most is not None and most < least:
            raise self._fault(f"{least} to {most} times is never possible", token, "write the smaller number first")
        if max(least, most or 0) > MAX_TIMES:
            raise self._fault(f"{max(least, most or 0)} times is too often", token, f"at most {MAX_TIMES}")
        following = self._peek()
        if following.text[:1] in ("*", "+", "?", "{", "~") and not self._is_definition():
            raise self._fault(f"{echo(following.text)} follows another repetition", following, "use parentheses")
        return Repeat(item, least, most)

    def _braces(self, token: LarkToken) -> tuple[int, int | None]:
        match = TIMES.fullmatch(token.text)
        if match is None:
            raise self._fault(f"{echo(token.text)} is not a number of times", token, "write {n}, {n,} or {n,m}")
        least = int(match[1])
        return least, least if match[2] is None else int(match[3]) if match[3] else None

    def _count(self) -> tuple[int, int]:
        """Reads the number that follows `~`, or the two."""
        token = self._take()
        if token.kind != "number":
            raise self._fault("no number follows ~", token, "write item~2 or item~1..3")
        least = int(token.text)
        if self._peek().kind != "span":
            return least, least
        self._at += 1
        last = self._take()
        if last.kind != "number":
            raise self._fault("no number follows ..", last, "write item~1..3")
        return least, int(last.text)

    def _item(self) -> Expression:
        token = self._take()
        if token.kind == "sign" and token.text in "([":
            return self._group(token)
        if token.kind == "literal":
            return self._terminal(token, self._literal(token))
        if token.kind == "regex":
            return self._terminal(token, _regex_of(token, self._flavour, self._fault))
        if token.kind == "name":
            self._grammar.calls.setdefault(token.text, (self._name, token.line))
            return RuleCall(token.text)
        if token.kind == "json":
            return self._json(token)
        if token.text == ":":
            raise self._fault("':' is not expected", token, RULE_HINT)
        raise self._fault(f"{echo(token.text)} is not expected", token, "put an item before it, or quote it")

    def _group(self, token: LarkToken) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._fault(
                f"parentheses are nested more than {MAX_NESTING} deep", token, "make rules of inner groups"
            )
        inner = self._alternatives()
        self._depth -= 1
        if not self._takes(")" if token.text == "(" else "]"):
            raise self._fault(f"{echo(token.text)} is not closed", token, "close it")
        return inner if token.text == "(" else Repeat(inner, 0, 1)

    def _terminal(self, token: LarkToken, expression: Expression) -> Expression:
        """In a rule it is a terminal of its own, named as it is written; in a terminal a part of that one."""
        if not RULE.fullmatch(self._name):
            return expression
        name = token.text
        if self._peek(-1) is not token:  # a range
            name += f"..{self._peek(-1).text}"
        self._grammar.rules[name] = expression
        return RuleCall(name)

    def _literal(self, token: LarkToken) -> Expression:
        text = _text_of(token, self._fault)
        if self._peek().kind != "span":
            return regex.parse(f"(?i:{re.escape(text)})", flavour="python") if token.text.endswith("i") else Text(text)
        self._at += 1
        last = self._take()
        end = _text_of(last, self._fault) if last.kind == "literal" else ""
        if len(text) != 1 or len(end) != 1 or end < text or "i" in (token.text[-1], last.text[-1]):
            raise self._fault("a range goes from one character up to another", token, 'write it as "a".."z"')
        return Chars(((ord(text), ord(end)),))

    def _json(self, token: LarkToken) -> Expression:
        if not RULE.fullmatch(self._name):
            raise self._fault("%json is in a terminal", token, "write it in a rule")
        prefix = f"%json{self._at}-"
        try:
            language = json_schema(token.text, prefix, strict=True)
        except GrammarError as error:
            raise self._fault(f"%json: {error}", token) from None
        rules = self._grammar.rules
        rules.update({name: unmarked(rule) for name, rule in language.rules.items()})
        rules[prefix] = unmarked(language.start)
        self._grammar.lines.update(dict.fromkeys((*language.rules, prefix), token.line))
        return RuleCall(prefix)

    def _fault(self, what: str, token: LarkToken, fix: str = "") -> GrammarError:
        line = token.line or (self._tokens[-1].line if self._tokens else 1)
        return fault(f"{echo(self._name)}: {what}", line, fix)


def _text_of(token: LarkToken, fail: Fail) -> str:
    """Returns the text that a literal stands for."""
    written = token.text.removesuffix("i")[1:-1]
    pieces: list[str] = []
    at = 0
    while at < len(written):
        match = ESCAPE.match(written, at)
        if match is None:
            shown = echo(written[at : at + 2])
            raise fail(f"the escape {shown} is not known", token, 'allowed are \\n \\t \\r \\\\ \\" \\xhh \\uhhhh')
        pieces.append(_unescaped(match[0]))
        at = match.end()
    text = "".join(pieces)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise fail("half of a surrogate pair is not a character", token, "write whole characters")
    return text


def _regex_of(token: LarkToken, flavour: PythonFlavour, fail: Fail) -> Expression:
    """Returns the language of a regular expression."""
    try:
        expression = pattern_terminal(token.text, flavour)
        if not is_empty(expression):
            return expression
    except GrammarError as error:
        raise fail(f"the regular expression is refused: {error}", token, "") from None
    raise fail("the regular expression matches nothing", token, "change or remove it")


def _tokens(text: str) -> list[LarkToken]:
    tokens: list[LarkToken] = []
    breaks = [at for at, character in enumerate(text) if character == "\n"]
    at = 0
    starts_line = True
    while at < len(text):
        match = TOKEN.match(text, at)
        line = bisect_right(breaks, at - 1) + 1
        if match is None or match.lastgroup is None:
            raise _unexpected(text, at, line)
        at = match.end()
        if match.lastgroup == "space":
            starts_line = starts_line or "\n" in match[0]
            continue
        if match[0] == "%json":
            at, schema = _json_text(text, at, line)
            tokens.append(LarkToken("json", schema, line, starts_line))
        else:
            tokens.append(LarkToken(match.lastgroup, match[0], line, starts_line))
        starts_line = False
    return tokens


def _json_text(text: str, at: int, line: int) -> tuple[int, str]:
    """The end of the JSON value, and the value."""
    start = len(text) - len(text[at:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        raise fault("no JSON schema follows %json", line, 'write it as %json {"type": "object"}') from None
    return end, text[start:end]


def _unexpected(text: str, at: int, line: int) -> GrammarError:
    for sign, hint in HINTS:
        if text.startswith(sign, at):
            return fault(f"{echo(sign)} is not expected", line, hint)
    return fault(f"{echo(text[at])} is not expected", line, "write literal text in double quotes")


def _unescaped(written: str) -> str:
    if written[0] != "\\":
        return written
    if written[1] in "xuU":
        return chr(int(written[2:], 16)) if int(written[2:], 16) < 0x110000 else "\ud800"
    return SHORT_ESCAPES.get(written[1], written[1])


def _is_rule(name: str) -> bool:
    return RULE.fullmatch(name) is not None


def _check_terminals(grammar: WrittenRules) -> None:
    """Terminals hold terminals only, and not themselves."""
    terminals = {name: list(calls(rule)) for name, rule in grammar.rules.items() if TERMINAL.fullmatch(name)}
    for name, called in terminals.items():
        rule = next((other for other in called if _is_rule(other)), None)
        if rule is not None:
            raise fault(
                f"terminal {echo(name)} holds the rule {echo(rule)}",
                grammar.lines[name],
                "write its name in small letters, or the rule's in CAPITALS",
            )
    names = cycle({name: [other for other in called if other in terminals] for name, called in terminals.items()})
    if names is not None:
        raise fault(f"terminal {echo(names[0])} holds itself", grammar.lines[names[0]], "make it a rule")


def _with_skips(rules: Rules, ignored: list[Expression]) -> dict[str, Expression]:
    """Every call of a terminal in a rule with what is ignored behind it."""

    def call(name: str) -> Expression:
        if _is_rule(name):
            return RuleCall(name)
        return chain((RuleCall(name), RuleCall(SKIP)))

    skipping = {name: replaced(rule, call) if _is_rule(name) else rule for name, rule in rules.items()}
    return skipping | {SKIP: Repeat(Choice(tuple(ignored)))}
