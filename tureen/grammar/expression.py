"""The language of a constraint as a tree: every frontend (regex, JSON schema, …) makes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tureen.grammar.guard.facts import GuardFacts

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class GrammarError(Exception):
    """A constraint that cannot be enforced; the message is for the client: what is wrong, where, what to do."""


class TooComplex(GrammarError):
    """A constraint that needs too much time or memory; the message says which."""


class SchemaError(GrammarError):
    """A schema or a pattern that is wrong by itself, or a schema that leads elsewhere: no part of it may be left out to
    enforce the rest."""


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this string; "" is the empty string."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these inclusive ranges of code points: sorted, disjoint, not adjacent, without surrogates.

    No range at all: nothing matches.
    """

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of these; without items nothing matches."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times, None = without end."""

    item: Expression
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Both:
    """Matches the strings that both expressions match. Both must be regular."""

    first: Expression
    second: Expression


@dataclass(frozen=True, slots=True)
class Not:
    """Every string (of characters that are no surrogates) that `item`, which must be regular, does not match."""

    item: Expression


@dataclass(frozen=True, slots=True)
class Terminal:
    """A regular `item` that may be matched greedily: what can follow it never begins as the rest of a longer match.

    It changes nothing in the language; a lexer makes one terminal of it.
    """

    item: Expression
    is_live: bool = field(default=False, compare=False)  # it is known that something is matched


@dataclass(frozen=True, slots=True)
class FreeText:
    """Free text of any length: a regular `item`. If the output may end in it, only the limit cuts the output.

    It does not change the language. It marks text that has no end to close towards.
    """

    item: Expression


@dataclass(frozen=True, slots=True)
class RuleCall:
    """Matches what the rule of this name matches. An expression without calls is regular."""

    name: str


Expression: TypeAlias = Text | Chars | Chain | Choice | Repeat | Both | Not | Terminal | FreeText | RuleCall

EMPTY = Text("")
NOTHING = Choice(())
ANY_CHAR = Chars(((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, MAX_CODE_POINT)))
ANYTHING = Repeat(ANY_CHAR)


class Unenforced(NamedTuple):
    """A keyword of a JSON schema that a language does not keep: an output of the language may break it."""

    keyword: str
    place: str  # of the value, as a JSON pointer in which "*" is any key or index: "/tags"; "" is the whole
    schema: str  # where the keyword stands: "#/properties/tags"
    why: str

    def __str__(self) -> str:
        return f"{self.keyword} at {self.place or 'the root'}"


@dataclass(frozen=True, slots=True)
class Language:
    """The language that the whole output must be in: `start`, which may call the rules by name."""

    start: Expression
    rules: Mapping[str, Expression] = field(default_factory=dict)
    unenforced: tuple[Unenforced, ...] = ()
    guard: GuardFacts | None = None  # what outputs must be held to besides
    guarded: tuple[Unenforced, ...] = ()  # what the language does not keep, and the guard does
    branches: tuple[Expression, ...] = ()  # what the guard asks about values that may be several things
    has_specials: bool = False  # its texts may be written with special tokens
    is_live: bool = False  # it is known of all rules that something matches, if something does of what is combined
