"""Languages to compare backends by, small enough to know all their strings up to a length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce

from tureen.grammar.base import Vocabulary
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    EMPTY,
    NOTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)

SPECIAL, END, OTHER_END = 256, 257, 258
EXTRA = (
    'ab|ba|aa|abc|bb|aba|a)|(a|((|))|()|+a|a+|a,|, |, a|], |[a|[[|]]|{"|"}|": |"a|a"|"a"|": "|1, |12|10|01|'
    "é|éa|aé|éé|😀|a😀|ab|x\\|\\n|<e|e>|<e>|a<|/a| a|a "
)
"""Texts of tokens, among them one twice and some that cross the borders of terminals."""

PIECES = (b"\xc3\xa9\xc3", b"a\xc3", b"\xa9a", b"\xf0\x9f", b"\x98\x80", b"\x80a")


def vocabulary():
    """Every byte, a special token, two ends, texts and pieces of characters; the model has more logits."""
    texts = tuple(text.encode() for text in EXTRA.split("|"))
    tokens = (*(bytes([byte]) for byte in range(256)), b"", b"", b"</s>", *texts, *PIECES)
    return Vocabulary(tokens, (END, OTHER_END), 32 * (len(tokens) // 32 + 2) + 5)


def encode(text):
    """The longest token first."""
    tokens = {token: index for index, token in reversed(list(enumerate(vocabulary().tokens))) if token != b"</s>"}
    rest, made = text.encode(), []
    while rest:
        size = next(size for size in range(min(len(rest), 6), 0, -1) if rest[:size] in tokens)
        made.append(tokens[rest[:size]])
        rest = rest[size:]
    return made


def chars(text):
    """Any character of the text."""
    return Chars(tuple((ord(char), ord(char)) for char in sorted(set(text))))


def chain(*items):
    return Chain(tuple(Text(item) if isinstance(item, str) else item for item in items))


def choice(*items):
    return Choice(tuple(Text(item) if isinstance(item, str) else item for item in items))


def star(item, least=0, most=None):
    return Repeat(item, least, most)


def optional(item):
    return Repeat(item, 0, 1)


def token(*items):
    return Terminal(items[0] if len(items) == 1 and not isinstance(items[0], str) else chain(*items))


def excluding(char):
    """Any character but this one."""
    point = ord(char)
    return Chars(((0, point - 1), (point + 1, 0xD7FF), (0xE000, 0x10FFFF)))


@dataclass(frozen=True)
class Sample:
    """A language. Every prefix of its strings that has at most `walked` characters begins one of at most `known`."""

    language: Language
    alphabet: str
    walked: int
    known: int
    regular: bool = True

    @cached_property
    def strings(self):
        """All its strings of at most `known` characters, as bytes."""
        return sorted(text.encode() for text in strings_of(self.language, self.alphabet, self.known))

    @cached_property
    def prefixes(self):
        """Of its strings."""
        return {string[:size] for string in self.strings for size in range(len(string) + 1)}

    def is_walked(self, prefix):
        """It begins a string of at most `walked` characters of the alphabet; the last one may not be complete."""
        text = prefix.decode(errors="ignore")
        rest = prefix[len(text.encode()) :]
        last = not rest or any(char.encode().startswith(rest) for char in self.alphabet)
        return last and set(text) <= set(self.alphabet) and len(text) + bool(rest) <= self.walked


def strings_of(language, alphabet, most):
    """All strings of the alphabet of at most `most` characters: the least sets that fit the rules."""
    known, sets = None, dict.fromkeys(language.rules, frozenset())
    while known != sets:
        known = sets
        sets = {name: _strings(rule, alphabet, most, known) for name, rule in language.rules.items()}
    return _strings(language.start, alphabet, most, sets)


def _strings(node, alphabet, most, sets):
    def of(item):
        return _strings(item, alphabet, most, sets)

    match node:
        case Text(text):
            return frozenset({text} if len(text) <= most and set(text) <= set(alphabet) else ())
        case Chars(ranges):
            return frozenset(char for char in alphabet if any(first <= ord(char) <= last for first, last in ranges))
        case Chain(items):
            return reduce(lambda found, item: _joined(found, of(item), most), items, frozenset({""}))
        case Choice(items):
            return frozenset().union(*map(of, items))
        case Repeat(item, least, times):
            return _repeated(of(item), least, times, most)
        case Terminal(item):
            return of(item)
        case RuleCall(name):
            return sets[name]
    if isinstance(node, Both):
        return of(node.first) & of(node.second)
    return _repeated(frozenset(alphabet), 0, None, most) - of(node.item)


def _joined(firsts, seconds, most):
    return frozenset(first + second for first in firsts for second in seconds if len(first) + len(second) <= most)


def _repeated(once, least, times, most):
    found = here = frozenset({""})
    for _ in range(least):
        found = here = _joined(here, once, most)
    for _ in range(most if times is None else min(times - least, most)):
        here = _joined(here, once, most)
        found |= here
    return found


def regular(start, alphabet, walked, known, **rules):
    return Sample(Language(start, rules), alphabet, walked, known)


def recursive(start, alphabet, walked, known, **rules):
    return Sample(Language(start, rules), alphabet, walked, known, regular=False)


A = chars("a")
STRING = token('"', star(chars("ab")), '"')
DIGITS = star(chars("01"), 1)
VALUE = choice(STRING, RuleCall("list"), token("1"), token("10"))
LIST = chain(token("["), optional(chain(RuleCall("value"), star(chain(token(","), RuleCall("value"))))), token("]"))

SAMPLES = {
    "a literal": regular(Text("abba"), "ab", 4, 4),
    "the empty string": regular(EMPTY, "ab", 1, 3),
    "the empty string or more": regular(choice(EMPTY, Terminal(Both(star(A), star(ANY_CHAR, 1)))), "ab", 5, 7),
    "prefixes of each other": regular(choice("a", "ab", "abab", "b", ""), "ab", 4, 5),
    "characters of several bytes": regular(star(chars("aé😀"), 1, 3), "aé😀", 3, 4),
    "neighbours of a character of two bytes": regular(chain(choice("é", "è"), "a"), "aéè", 2, 3),
    "any character": regular(chain(ANY_CHAR, "a"), "aé😀\n", 2, 2),
    "all but a quote": regular(chain('"', star(excluding('"'), 0, 2), '"'), '"aé', 4, 5),
    "nested repeats": regular(star(star(chars("ab"), 2, 2), 1, 2), "ab", 4, 6),
    "repeats that can be empty": regular(star(chain(star(A), optional(Text("b")))), "ab", 4, 6),
    "counts with gaps": regular(star(Text("aa"), 1, 3), "ab", 6, 8),
    "both": regular(Both(chain(ANYTHING, "a", ANYTHING), star(chars("ab"), 0, 3)), "ab", 4, 6),
    "not": regular(chain("a", Both(Not(chain(ANYTHING, "bb", ANYTHING)), star(chars("ab"), 1, 4)), ")"), "ab)", 5, 7),
    "not without bounds": regular(Not(choice("a", "ab", "ba")), "ab", 4, 6),
    "contradictions inside": regular(
        choice(chain("a", Both(Text("b"), Text("a"))), chain("b", NOTHING), chain("b", optional(NOTHING), "a")),
        "ab",
        3,
        4,
    ),
    "a marked contradiction": regular(
        choice(chain(token("a"), Terminal(Both(Text("b"), Text("a")))), chain(token("b"), token("a"))), "ab", 3, 4
    ),
    "terminals": regular(
        chain(token("["), token("a"), star(chain(token(", "), token("a")), 0, 2), token("]")), "[]a, ", 5, 9
    ),
    "nothing beside a terminal, and an end that is not certain": regular(
        choice(chain(token("a"), choice(EMPTY, token("b"))), chain("a", star(chars("ab")), ")")), "ab)", 5, 7
    ),
    "terminals that begin alike, and what may follow only one of them": regular(
        chain(choice(chain("ab", token("a")), chain("aa", star(chars("ab")))), optional(Text(")"))), "ab)", 5, 7
    ),
    "terminals that are prefixes": regular(
        chain(choice(token("1"), token("10"), token("1", star(chars("0")), "1")), token("]")), "01]", 4, 6
    ),
    "an object": regular(
        chain(token("{"), token('"a"'), token(":"), choice(STRING, token(DIGITS)), token("}")), '{}":a0', 6, 10
    ),
    "a literal and terminals without marks": regular(
        chain("a", token("b"), star(chars("ab")), token(")")), "ab)", 4, 6
    ),
    "a terminal that a greedy lexer takes too much for": regular(chain(star(A), star(Text("ab"), 1, 2)), "ab", 5, 9),
    "marked before what is not": regular(chain(token(star(A, 1)), star(Text("ba"), 0, 2)), "ab", 5, 7),
    "up to a string": regular(
        chain(token(Both(chain(ANYTHING, "<e>"), Not(chain(ANYTHING, "<e>", star(ANY_CHAR, 1))))), token("1")),
        "<e>1",
        3,
        7,
    ),
    "not marked up to a string": regular(
        chain(Both(chain(ANYTHING, "ab"), Not(chain(ANYTHING, "ab", star(ANY_CHAR, 1)))), token("b"), "a"), "ab", 4, 8
    ),
    "rules": regular(
        chain(RuleCall("x"), ",", RuleCall("x")), "ab,", 4, 5, x=choice(RuleCall("y"), "b"), y=star(A, 1, 2)
    ),
    "brackets": recursive(RuleCall("x"), "()", 4, 8, x=optional(chain("(", RuleCall("x"), ")"))),
    "pairs of brackets": recursive(RuleCall("x"), "()a", 4, 8, x=star(choice(A, chain("(", RuleCall("x"), ")")))),
    "sums": recursive(
        RuleCall("sum"),
        "(+)a",
        4,
        9,
        sum=chain(RuleCall("item"), star(chain("+", RuleCall("item")))),
        item=choice(star(A, 1), chain("(", RuleCall("sum"), ")")),
    ),
    "a middle": recursive(
        RuleCall("x"), "ab", 4, 8, x=choice("a", chain("a", RuleCall("x"), "b"), chain("b", RuleCall("x")))
    ),
    "words before recursion": recursive(
        chain(star(chars("ab")), RuleCall("x")), "ab(", 3, 8, x=choice("ab", chain("(", RuleCall("x"), "a"))
    ),
    "rules that cannot end": recursive(
        choice(RuleCall("x"), RuleCall("y")),
        "ab",
        3,
        5,
        x=chain("a", RuleCall("x")),
        y=choice("b", chain("b", RuleCall("y"))),
    ),
    "nested lists": recursive(RuleCall("value"), '[],"1', 4, 9, value=choice(RuleCall("list"), token("1")), list=LIST),
    "lists of values": recursive(RuleCall("list"), '[,]"1', 3, 7, value=VALUE, list=LIST),
    "separators": recursive(
        RuleCall("x"),
        "a, ()",
        4,
        9,
        x=chain(RuleCall("y"), star(chain(",", optional(Text(" ")), RuleCall("y")))),
        y=choice("a", chain("(", RuleCall("x"), ")")),
    ),
    "blanks on both sides": recursive(
        RuleCall("x"),
        "a ()",
        4,
        9,
        x=chain(star(Text(" ")), choice("a", chain("(", RuleCall("x"), ")")), star(Text(" "))),
    ),
}
