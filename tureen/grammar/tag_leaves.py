"""Formats of structural tags that hold no other format: texts, JSON, patterns, grammars, free text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from tureen.errors import echo
from tureen.grammar import regex
from tureen.grammar.expression import (
    Both,
    Chain,
    Choice,
    Expression,
    GrammarError,
    Language,
    Not,
    RuleCall,
    Terminal,
    Unenforced,
)
from tureen.grammar.fragments import Assembly, TerminalPiece, fixed
from tureen.grammar.free_text import any_of, endless, free_of, to_the_end, up_to
from tureen.grammar.guard.facts import GuardNode
from tureen.grammar.guard.finding import Follows
from tureen.grammar.json_text import flag, integer, keys, string, strings
from tureen.grammar.notations import grammar
from tureen.grammar.regex_classes import PythonFlavour
from tureen.grammar.regular import continuations, first_chars, is_empty
from tureen.grammar.rules import SOMETHING, calls, can_be_empty, chain, replaced
from tureen.grammar.schema.language import json_schema, tagged_schema
from tureen.grammar.schema.strings import encoded_language
from tureen.grammar.schema.tagged import STYLES, without_texts
from tureen.grammar.tagged_steps import TaggedValues

T = TypeVar("T")

MAX_CHARS = 2_000
NO_BUDGET = 1 << 31  # tokens: more than any output has
MAX_STATES = 500  # of an automaton that is only made to find a terminal

SCHEMA_STYLES = {"json_schema": "json", "qwen_xml_parameter": "qwen_xml"}
"""The formats that have a schema, and the style in which they are written where they name none."""

JSON_STARTS = tuple('{["-0123456789tfn')
NUMBER_GOES_ON = "0123456789.eE+-"


@dataclass(frozen=True, slots=True)
class FormatPlace:
    """The place of a format in its tag."""

    path: str
    depth: int = 0
    ends: tuple[str, ...] = ()  # of the tag around it: free text never holds them
    stops: tuple[str, ...] | None = None
    """One of these follows and belongs to what the format becomes; none: something else; None: the output ends."""

    @property
    def schema(self) -> str:
        """Returns the path of the format's JSON schema."""
        return f"{self.path}.json_schema"

    def inner(self, path: str) -> FormatPlace:
        """Returns the place of a part that more follows."""
        return FormatPlace(f"{self.path}.{path}", self.depth + 1, self.ends, ())

    def last(self, path: str) -> FormatPlace:
        """Returns the place of a part that stands at the end of it."""
        return replace(self, path=f"{self.path}.{path}", depth=self.depth + 1)


class GuardedLeaves(NamedTuple):
    """The guarded values of a structural tag, by the paths of their schemas."""

    nodes: list[GuardNode]
    values: dict[str, int]  # of those that are written as JSON: their node
    tagged: dict[str, TaggedValues]  # of those whose properties stand in tags
    branches: list[Expression]
    starts: dict[str, str]  # the characters that one of the values can begin with
    budgets: dict[str, int]  # by the paths of free texts: the most tokens that they may have
    never: dict[str, tuple[bytes, ...]]  # by the paths of some of these: the texts that they may not be


class LeafFormats:
    """Makes pieces of the formats that hold no other; what they need of rules goes to `assembly`."""

    def __init__(self, assembly: Assembly, *, strict: bool, flavour: PythonFlavour, follows: Follows) -> None:
        self.unenforced: list[Unenforced] = []  # of what the schemas say
        self.guarded: list[Unenforced] = []  # what is enforced by a guard, if it can follow the tag
        self.promised: list[Unenforced] = []  # of that, what is strict
        self.guards = GuardedLeaves([], {}, {}, [], {}, {}, {})
        self._assembly = assembly
        self._strict = strict
        self._flavour = flavour
        self._follows = follows
        self._languages = 0

    def const_string(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "value"))
        return self.ended(fixed(string(value["value"], f"{place.path}.value")), place)

    def json_schema(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(
            value,
            place.path,
            ("type", "json_schema"),
            ("style", "any_order", "max_whitespace_cnt", "excludes", "strict"),
        )
        flag(value.get("any_order", False), f"{place.path}.any_order")  # the order of the schema is one of them
        most = value.get("max_whitespace_cnt")
        if most is not None and integer(most, f"{place.path}.max_whitespace_cnt") < 1:
            raise GrammarError(f"{place.path}.max_whitespace_cnt must be at least 1: one space follows , and :")
        schema = value["json_schema"]
        if not isinstance(schema, (dict, bool)):
            raise GrammarError(f"{place.schema} must be a schema, got {echo(schema)}")
        excludes = strings(value.get("excludes", []), f"{place.path}.excludes", may_be_none=True)
        style = value.get("style", "json")
        path = place.schema
        is_strict = flag(value.get("strict", self._strict), f"{place.path}.strict")
        if style == "json":
            return self.ended(self.schema(json.dumps(schema), path, excludes, strict=is_strict), place)
        if not isinstance(style, str) or style not in STYLES:
            raise GrammarError(f"{place.path}.style must be json or one of {', '.join(STYLES)}, got {echo(style)}")
        language, values = _at(
            path,
            lambda: tagged_schema(
                json.dumps(schema), style, self._prefix(), excludes, strict=is_strict, follows=self._follows
            ),
        )
        self._assembly.rules.update(language.rules)
        first = self._note(language, path, strict=is_strict)
        if first is not None:
            self.guards.tagged[path] = values.moved(first)
        return self.ended(TerminalPiece(language.start), place)

    def qwen_xml_parameter(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "json_schema"))
        return self.json_schema({**value, "style": "qwen_xml"}, place)

    def schema(
        self, schema: str, path: str, excludes: Sequence[str] = (), *, strict: bool | None = None
    ) -> TerminalPiece:
        is_strict = self._strict if strict is None else strict
        language = _at(
            path,
            lambda: json_schema(schema, self._prefix(), strict=is_strict, guards=True, follows=self._follows),
        )
        language = without_texts(language, excludes)
        self._assembly.rules.update(language.rules)
        first = self._note(language, path, strict=is_strict)
        self.guards.starts[path] = first_characters(language)
        if first is not None:
            self.guards.values[path] = first
        return TerminalPiece(language.start, JSON_STARTS, NUMBER_GOES_ON)

    def _note(self, language: Language, path: str, *, strict: bool) -> int | None:
        """Notes what the language of a schema does not keep. Returns the number of its first guarded node."""
        self.unenforced += (item._replace(schema=path + item.schema) for item in language.unenforced)
        guarded = [item._replace(schema=path + item.schema) for item in language.guarded]
        self.guarded += guarded
        self.promised += guarded if strict else ()
        if language.guard is None:
            return None
        first = len(self.guards.nodes)
        num_branches = len(self.guards.branches)
        self.guards.nodes.extend(node.moved(first, num_branches) for node in language.guard.nodes)
        self.guards.branches.extend(language.branches)
        return first

    def grammar(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "grammar"))
        text = string(value["grammar"], f"{place.path}.grammar")
        language = _at(f"{place.path}.grammar", lambda: grammar(text, self._flavour))
        prefix = self._prefix()

        def renamed(name: str) -> RuleCall:
            return RuleCall(prefix + name)

        self._assembly.rules.update({prefix + name: replaced(rule, renamed) for name, rule in language.rules.items()})
        return self._set(replaced(language.start, renamed), place)

    def json_string(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        """Reads a JSON string whose text a grammar or a pattern allows."""
        kind = "pattern" if isinstance(value, dict) and "pattern" in value else "grammar"
        keys(value, place.path, ("type", kind))
        path = f"{place.path}.{kind}"
        text, prefix = string(value[kind], path), self._prefix()

        def language() -> Language:
            strings = (
                grammar(text, self._flavour)
                if kind == "grammar"
                else Language(regex.parse(text, flavour=self._flavour))
            )
            if kind == "pattern" and is_empty(strings.start):
                raise GrammarError(f"it matches nothing: {echo(text)}; change it")
            return encoded_language(strings, lambda name: RuleCall(prefix + name))

        encoded = _at(path, language)
        self._assembly.rules.update(encoded.rules)
        return self._set(encoded.start, place)

    def regex(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type", "pattern"))
        path = f"{place.path}.pattern"
        pattern = string(value["pattern"], path)
        expression = _at(path, lambda: regex.parse(pattern, flavour=self._flavour))
        if _at(path, lambda: is_empty(expression)):
            raise GrammarError(f"{path} matches nothing: {echo(pattern)}; change it")
        return self._set(expression, place)

    def _set(self, expression: Expression, place: FormatPlace) -> TerminalPiece:
        """Makes an expression without terminals of its own one terminal, if it shows where its text ends."""
        if any(calls(expression)):
            return self.ended(TerminalPiece(expression), place)
        if place.stops is None:
            return TerminalPiece(to_the_end(expression))
        whole = chain((expression, any_of(place.stops))) if place.stops else expression
        if can_be_empty(whole) or _can_go_on(whole):
            return TerminalPiece(whole)
        return TerminalPiece(Terminal(whole), None, "")

    def any_text(self, value: dict[str, Any], place: FormatPlace) -> TerminalPiece:
        keys(value, place.path, ("type",), ("excludes", "max_chars", "max_tokens"))
        if value.get("max_tokens") is not None:
            budget = integer(value["max_tokens"], f"{place.path}.max_tokens")
            self.guards.budgets[place.path] = min(budget, NO_BUDGET)
        excludes = strings(value.get("excludes", []), f"{place.path}.excludes", may_be_none=True)
        most = value.get("max_chars")
        if most is not None:
            most = integer(most, f"{place.path}.max_chars", MAX_CHARS)
        if place.stops:
            return TerminalPiece(up_to(place.stops, place.stops, free_of(excludes, most)), None, "")
        free = free_of((*excludes, *place.ends), most)
        if most is None and place.path not in self.guards.budgets:
            return TerminalPiece(endless(free, is_last=place.stops is None))
        return TerminalPiece(to_the_end(free)) if place.stops is None else TerminalPiece(free)

    def one_token(self, excludes: Sequence[str], place: FormatPlace) -> TerminalPiece:
        """Returns a text that one token holds, and that is none of `excludes`."""
        self.guards.budgets[place.path] = 1
        self.guards.never[place.path] = (b"", *(text.encode() for text in excludes))
        free = Both(SOMETHING, Not(any_of(excludes))) if excludes else SOMETHING
        if place.stops:
            return TerminalPiece(up_to(place.stops, place.stops, free), None, "")
        return TerminalPiece(to_the_end(free)) if place.stops is None else TerminalPiece(free)

    def ended(self, piece: TerminalPiece, place: FormatPlace) -> TerminalPiece:
        return self._assembly.ended(piece, place.stops or ())

    def _prefix(self) -> str:
        self._languages += 1
        return f"t{self._languages}-"


def first_characters(language: Language) -> str:
    """Returns the characters, of those that JSON begins with, that a JSON value of a language can begin with."""
    starts: set[str] = set()
    seen: set[str] = set()
    waiting = [language.start]
    while waiting:
        match waiting.pop():
            case RuleCall(name) if name not in seen:
                seen.add(name)
                waiting.append(language.rules[name])
            case Choice(items):
                waiting += items
            case Chain(items):
                waiting += items[: next((at for at, item in enumerate(items) if not can_be_empty(item)), 0) + 1]
            case Terminal(item):
                ranges = first_chars(item).ranges
                starts |= {char for char in JSON_STARTS if any(low <= ord(char) <= high for low, high in ranges)}
    return "".join(starts)


def _can_go_on(expression: Expression) -> bool:
    """Some of its texts begin others, or it takes long to tell."""
    try:
        return bool(continuations(expression, MAX_STATES).ranges)
    except GrammarError:
        return True


def _at(path: str, read: Callable[[], T]) -> T:
    """Names the place in an error."""
    try:
        return read()
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}") from None
