"""Patterns of Python and of ECMA-262 as languages, against `re` and against the JSON Schema Test Suite."""

import itertools
import json
import random
import re
import tarfile
import unicodedata
import warnings
from functools import cache
from pathlib import Path

import pytest
from matching import matches_expression
from samples import some

from tureen.grammar.expression import MAX_CODE_POINT, SURROGATES, Chars, GrammarError, Repeat, Text
from tureen.grammar.regex import parse, search
from tureen.grammar.regular import accepts, automaton

SUITE = Path(__file__).parent / "json-schema-test-suite.tar.xz"
TEXTS = ["".join(chars) for length in range(4) for chars in itertools.product("aB\n-", repeat=length)]
EVERY_CHAR = "".join(chr(point) for point in range(MAX_CODE_POINT + 1) if not SURROGATES[0] <= point <= SURROGATES[1])

# what is written alike in both languages, or the Python for the ECMA-262; \s, \w and \b as ASCII
ALIKE = ["a", "b", "B", "-", "ab", "a-", r"\w", r"\W", r"\d", r"\D", r"\n", "[ab]", "[^a]", r"[^\w]", "[a-z]", r"[\d-]"]
PYTHON_ATOMS = [
    *ALIKE,
    ".",
    r"\s",
    "[]a]",
    "[^]a]",
    "{",
    "}",
    "]",
    r"[\s-]",
    r"\x61",
    r"\141",
    r"[\b]",
    r"\N{HYPHEN-MINUS}",
]
ECMA_ATOMS = [*((atom, atom) for atom in ALIKE), (".", r"[^\n\r\u2028\u2029]"), ("[^]", r"[\s\S]"), ("[]", "(?!)")]
ECMA_ATOMS += [(r"\u{61}", "a"), (r"\cJ", r"\n"), (r"\u0061", "a"), (r"[\u{41}-\u{5a}]", "[A-Z]"), (r"\/", "/")]
PYTHON_GROUPS = ["({})", "(?:{})", "(?i:{})", "(?s:{})", "(?m:{})", "(?-i:{})", "(?P<name>{})"]
QUANTIFIERS = ["*", "+", "?", "{2}", "{1,2}", "{1,}", "*?", "+?", "??", "{2,3}?", "{0}"]


class Patterns:
    """Random patterns as pairs of what is parsed and what `re` gets."""

    def __init__(self, seed, atoms, marks, groups):
        self.rng, self.atoms, self.marks, self.groups = random.Random(seed), atoms, marks, groups

    def chain(self, depth, most):
        pairs = [self.one(depth) for _ in range(self.rng.randrange(1, most))]
        return "".join(one for one, _ in pairs), "".join(other for _, other in pairs)

    def one(self, depth):
        kind = self.rng.randrange(12) if depth else 0
        if kind < 3:
            return self.rng.choice(self.atoms)
        if kind < 4:
            return self.rng.choice(self.marks)
        if kind < 6:
            return self.chain(depth - 1, 4)
        if kind == 11:
            one, other = self.wrapped(self.rng.choice(["(?={})", "(?!{})", "((?!{})[ab])*"]), self.one(depth - 1))
            return (one + "$", other + dict(self.marks)["$"]) if one.endswith("*") else (one, other)
        if kind < 8:
            branches = [
                self.one(depth - 1) if self.rng.random() < 0.9 else ("", "") for _ in range(self.rng.randrange(4))
            ]
            joined = "|".join(one for one, _ in branches), "|".join(other for _, other in branches)
            return self.wrapped(self.rng.choice(self.groups), joined)
        return self.wrapped(
            "(?:{})" + self.rng.choice(QUANTIFIERS).replace("{", "{{").replace("}", "}}"), self.one(depth - 1)
        )

    @staticmethod
    def wrapped(form, pair):
        return form.format(pair[0]), form.format(pair[1])


def compiled(pattern):
    """As `re` has it; None where it is no pattern."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(pattern)
    except re.error:
        return None


def agreeing(pairs, flavour):
    """How many patterns were parsed; each must match exactly what `re` does."""
    parsed = 0
    for pattern, for_re in pairs:
        expected = compiled(for_re)
        for make, found in ((parse, "fullmatch"), (search, "search")):
            try:
                tree = make(pattern, flavour=flavour)
            except GrammarError:
                continue
            assert expected is not None, f"{pattern!r} is no pattern of re"
            machine = automaton(tree)
            wrong = [text for text in TEXTS if accepts(machine, text) != bool(getattr(expected, found)(text))]
            assert not wrong, (pattern, make, wrong)
            parsed += 1
    return parsed


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(3), 1))
def test_random_python_patterns_match_what_re_matches(seed):
    marks = [(mark, mark) for mark in ("^", "$", r"\b", r"\B", r"\A", r"\Z")]
    patterns = Patterns(seed, [(atom, atom) for atom in PYTHON_ATOMS], marks, PYTHON_GROUPS)
    flags = ["", "", "", "(?i)", "(?m)", "(?s)", "(?ims)", "(?a)", "(?#any)"]
    pairs = [patterns.chain(3, 4) for _ in range(150)]
    pairs = [(prefix + one, prefix + one) for one, _ in pairs for prefix in (patterns.rng.choice(flags),)]
    assert agreeing(pairs, "python") > 230


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(3), 1))
def test_random_ecma_patterns_match_what_the_same_in_python_matches(seed):
    marks = [("^", "^"), ("$", r"\Z"), (r"\b", r"\b"), (r"\B", r"(?!\b)")]
    patterns = Patterns(seed, ECMA_ATOMS, marks, ["({})", "(?:{})"])
    pairs = [(one, "(?a)" + other) for one, other in (patterns.chain(3, 4) for _ in range(150))]
    assert agreeing(pairs, "ecma") > 230


@cache
def categories():
    return list(map(unicodedata.category, EVERY_CHAR))


def spans(pattern, flags="", text=EVERY_CHAR):
    """The ranges of code points that `re` finds one by one."""
    found = []
    for match in re.finditer(f"{flags}(?:{pattern})+", text):
        first, last = ord(match[0][0]), ord(match[0][-1])
        crosses = first < SURROGATES[0] and last > SURROGATES[1]
        found += [(first, SURROGATES[0] - 1), (SURROGATES[1] + 1, last)] if crosses else [(first, last)]
    return tuple(found)


@pytest.mark.parametrize("flag", ["", "(?a)"])
@pytest.mark.parametrize("pattern", [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", r"[^\w\s]", r"[\D\x20-\x40]"])
def test_classes_hold_the_characters_that_re_finds(flag, pattern):
    tree = parse(flag + pattern, flavour="python")
    assert isinstance(tree, Chars)
    assert tree.ranges == spans(pattern, flag)


@pytest.mark.parametrize("pattern", [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[^\w\s]", r"[\D\x20-\x40]", r"[^\W_]"])
@pytest.mark.parametrize("flag", ["", "(?i)"])
def test_ascii_shorthands_hold_the_characters_that_re_finds_in_ascii(flag, pattern):
    assert parse(flag + pattern, flavour="python-ascii").ranges == spans(pattern, "(?a)")
    assert parse(f"(?u){pattern}", flavour="python-ascii").ranges == spans(pattern)


@pytest.mark.parametrize("pattern", ["é", "[à-ö]", "[^ß-ÿ]"])
def test_case_of_all_letters_is_ignored_where_shorthands_are_ascii(pattern):
    assert parse(f"(?i){pattern}", flavour="python-ascii").ranges == spans(pattern, "(?i)")
    matched = automaton(parse(r"(?i)[\dé]\bx|\Bé", flavour="python-ascii"))
    assert [text for text in ("1x", "Éx", "É", "é") if accepts(matched, text)] == ["Éx", "É", "é"]


@pytest.mark.parametrize("pattern", ["k", "s", "ß", "σ", "ǆ", "İ", "ı", "é", "ŉ", "Ω", "ﬅ", "ΐ", "1", "Ж"])
def test_case_is_ignored_for_exactly_the_characters_of_re(pattern):
    tree = parse(f"(?i){pattern}", flavour="python")
    found = spans(pattern, "(?i)")
    assert tree == (Text(pattern) if found == ((ord(pattern), ord(pattern)),) else Chars(found))


@pytest.mark.parametrize("pattern", ["[a-z]", "[^a-z]", r"[^\W_]", "[À-Ö]", "[^ß-ÿ]", "[k-ſ]", "[σ1-9]"])
@pytest.mark.parametrize("flag", ["(?i)", "(?ia)"])
def test_case_is_ignored_in_classes_as_re_does(flag, pattern):
    assert parse(flag + pattern, flavour="python").ranges == spans(pattern, flag)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r"\p{L}", ("Lu", "Ll", "Lt", "Lm", "Lo")),
        (r"\p{Lu}", ("Lu",)),
        (r"\p{Uppercase_Letter}", ("Lu",)),
        (r"\p{gc=Nd}", ("Nd",)),
        (r"\p{digit}", ("Nd",)),
        (r"\p{LC}", ("Lu", "Ll", "Lt")),
        (r"[\p{P}\p{Sc}]", ("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sc")),
    ],
)
def test_general_categories_are_those_of_unicode(pattern, names):
    text = "".join(char if name in names else "\0" for char, name in zip(EVERY_CHAR, categories(), strict=True))
    inside = parse(pattern, flavour="ecma").ranges
    assert inside == spans("[^\0]", text=text)
    outside = parse("[^" + pattern.strip("[]") + "]", flavour="ecma").ranges
    assert sum(last - first + 1 for first, last in inside + outside) == len(EVERY_CHAR)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(sorted(inside + outside)))


def test_a_capital_p_means_the_other_characters():
    assert parse(r"\P{Lu}", flavour="ecma") == parse(r"[^\p{Lu}]", flavour="ecma")


@pytest.mark.parametrize(
    ("pattern", "found", "not_found"),
    [
        (r"^\S+$", "a-é", " \xa0\ufeff\u2028\u3000\x0b"),
        (r"\d", "7", "٣५"),
        (r"\w", "aZ_9", "é߀-"),
        (".", "a\x85\x0b😀", "\n\r\u2028\u2029"),
        (r"\cC", "\x03", "Cc"),
        (r"\0", "\0", "0"),
        (r"^\x41\u0042\u{43}$", ["ABC"], ["AB"]),
        (r"^\ud83d\ude00$", ["😀"], ["\ufffd"]),
        (r"^[\ud83d\ude00-\ud83d\ude10]$", "😀😐", "😑"),
        (r"[^\ud800-\udfff]", "a😀", ""),
        (r"^[\w-\.]+@x$", ["a-.b@x"], ["a+b@x"]),
        ("^[a-]$", "a-", "b"),
        ("^[]]$", [], ["]", "]]", ""]),
        (r"^[\b]$", "\b", "b"),
        ("^{}]$", ["{}]"], ["}"]),
        (r"\-\@\ ", ["-@ "], ["-@"]),
        ("a$", ["a", "ba"], ["a\n", "ab"]),
        ("^a|b$", ["ac", "cb", "ab"], ["ca", "bc"]),
        ("(?<year>[0-9]{4})", ["1999", "x1999"], ["199"]),
        (r"^(?=.*[A-Z])(?=.*\d)(?!.*\s).{4,6}$", ["Abc1", "1bcA99"], ["abc1", "Abcd", "A b1", "Abc1Abc"]),
        (r"^(?!(?:if|else)$)[a-z]+$", ["iff", "els", "x"], ["if", "else", ""]),
        (r"\bcat\b", ["cat", "a cat!", "cat cat"], ["cats", "concat", "_cat"]),
        (r"^(?:\d+(?:,|$))+$", ["1", "1,22", "1,2,"], ["", ",1", "1,,2"]),
        (r"^(?:(?!,).)*,$", ["ab,", ","], ["a,b,", "ab"]),
        ("^(?=a)*b$", ["b"], ["a"]),
        ("^((?!no).)*$", ["", "n", "on", "nn", "oon"], ["no", "xno", "noo"]),
        ("^(?:(?!ab)[ab])+(?:b|ba)$", ["bb", "bba"], ["ab", "abb", "b", "bab", "baba"]),
    ],
)
def test_ecma_patterns_mean_what_the_standard_says(pattern, found, not_found):
    tree = search(pattern, flavour="ecma")
    assert [text for text in found if not matches_expression(tree, text)] == []
    assert [text for text in not_found if matches_expression(tree, text)] == []


def suite_cases():
    with tarfile.open(SUITE) as archive:
        for member in archive:
            if member.name.endswith(("/pattern.json", "/ecmascript-regex.json")):
                for group in json.loads(archive.extractfile(member).read()):
                    pattern = group["schema"].get("pattern")
                    texts = [(case["data"], case["valid"]) for case in group["tests"] if isinstance(case["data"], str)]
                    if pattern is not None and texts:
                        yield pytest.param(pattern, texts, id=f"{member.name}: {group['description']}")


@pytest.mark.parametrize(("pattern", "texts"), suite_cases())
def test_patterns_of_the_json_schema_test_suite(pattern, texts):
    machine = automaton(search(pattern, flavour="ecma"))
    assert [(text, accepts(machine, text)) for text, _ in texts] == texts


@pytest.mark.parametrize(
    ("pattern", "flavour", "message"),
    [
        (r"(a)\1", "python", "backreferences"),
        (r"(a)\1", "ecma", "backreferences"),
        (r"(?<n>a)\k<n>", "ecma", "backreferences"),
        ("(?P<n>a)(?P=n)", "python", "backreferences"),
        ("(a)?(?(1)b)", "python", "conditional"),
        ("a++", "ecma", "a repeat is repeated"),
        ("(?i)a", "ecma", "no such group"),
        ("(?P<n>a)", "ecma", "no such group"),
        ("(?<n>a)", "python", "no such group"),
        ("(?P<n>a)(?P<n>b)", "python", "used twice"),
        ("a(?i)b", "python", "at its beginning"),
        ("*a", "python", "nothing to repeat"),
        ("^*", "ecma", "nothing to repeat"),
        ("a{2}{3}", "python", "a repeat is repeated"),
        ("a{3,2}", "ecma", "reversed"),
        ("a{,3}", "ecma", "write {0,n}"),
        ("[b-a]", "python", "reversed"),
        (r"[\w-a]", "python", "from one character"),
        ("[a", "ecma", "not closed"),
        ("(a", "ecma", r"not closed.*\(position 0\)"),
        ("a)", "python", r"without its .* \(position 1\)"),
        ("a\\", "python", "escapes nothing"),
        (r"\q", "python", r"no escape \\q"),
        (r"\a", "ecma", r"no escape \\a"),
        (r"\Z", "ecma", r"no escape \\Z"),
        (r"\01", "ecma", "octal"),
        (r"\u{110000}", "ecma", "code point"),
        (r"\u{" + "f" * 10_000 + "}", "ecma", "code point"),
        (r"\x4", "python", "hexadecimal"),
        (r"\ud800", "ecma", "surrogate"),
        (r"\p{Script=Klingon}", "ecma", "Unicode has no property"),
        (r"\p{Greek}", "ecma", "general categories"),
        (r"\p{Klingon}", "python", "Unicode has no property"),
        (r"(?i)\p{Lu}", "python", "where case is ignored"),
        ("(?<=a$)b", "python", "a lookbehind can hold no assertion but"),
        ("(?=b(?<=a))b", "ecma", "a lookahead cannot hold a lookbehind"),
        ("(?>a+?)b", "python", "an atomic group cannot hold a lazy repeat"),
        ("(?>[ab]*b|c)", "python", r"what it tries first is not certain"),
        ("(?:a|ab)*+", "python", "what shows its end by itself"),
        ("(?>a)", "ecma", "no such group"),
        ("".join(f"(?<!{at:02}x)" for at in range(33)), "ecma", "too many assertions: at most 32"),
        (r"\N{NO SUCH CHARACTER}", "python", "no character has the name"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(pattern, flavour, message):
    with pytest.raises(GrammarError, match=message):
        search(pattern, flavour=flavour)


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 30_000 + ")" * 30_000,
        "(?:a|" * 12_000,
        "[" * 60_000,
        "a" + "*" * 60_000,
        "^" * 60_000,
        "(?=a)" * 12_000,
        "(?:^|a)" * 9_000,
        "((?=a)|b)" * 60,
        r"(?:a\b|bc|d\b.)" * 40,
        "(?:a{100000}){100000}",
        "a{999999999999}",
        "x" * 70_000,
    ],
)
def test_hostile_patterns_are_refused(pattern):
    with pytest.raises(GrammarError):
        search(pattern, flavour="ecma")


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("^(a+)+b$", 3),
        ("^(.*a){25}$", 26),
        ("(x+x+)+y", 4),
        ("^(a|b|ab)*c$", 2),
        ("^(a{1,100}){1,100}$", 10_001),
        ("^" + "a?" * 300 + "$", 301),
        ("^" + "|".join(f"{number:05}" for number in range(9000)), 30),
        ("^[" + "".join(map(chr, range(0x4E00, 0x9000, 2))) + "]+$", 2),
        ("^" + "(?:a" * 50 + "b" + ")*" * 50 + "$", 200),
    ],
)
def test_catastrophic_patterns_make_small_automata(pattern, states):
    assert len(automaton(search(pattern, flavour="ecma")).moves) <= states


def test_a_long_counted_class_stays_one_repeat():
    assert parse("[ab]{1,100000}", flavour="python") == Repeat(Chars(((97, 98),)), 1, 100_000)
