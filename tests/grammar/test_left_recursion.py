"""Rules that call themselves first: random ones against a recogniser that works on the rules as they are written."""

import re
from random import Random

import numpy as np
import pytest
from backend_languages import encode, vocabulary
from matching import matches
from other_matchers import llguidance_takes
from samples import some
from short_strings import assert_same, strings

from tureen.grammar import LanguageCompiler
from tureen.grammar.ebnf import ebnf
from tureen.grammar.expression import GrammarError
from tureen.grammar.left_recursion import MAX_GROUP
from tureen.kernels.cpu import native

VOCABULARY = vocabulary()
COMPILER = LanguageCompiler(VOCABULARY, encode, native.require())


def started(language):
    return COMPILER.load(COMPILER.translate(language)).start()


def random_rules(random):
    """Rules as lists of alternatives, which are lists of (text or name, sign)."""
    names = [f"r{at}" for at in range(random.randrange(1, 5))]

    def item():
        symbol = random.choice(names) if random.random() < 0.55 else random.choice(["a", "b", "ab", ""])
        return symbol, random.choice(["", "", "", "", "?", "*", "+"])

    def alternatives():
        return [[item() for _ in range(random.randrange(3))] for _ in range(random.randrange(1, 3))] + [
            [(random.choice(["a", "b", ""]), "")]
        ]

    return {name: alternatives() for name in names}


def written(rules):
    def shown(symbol, sign):
        return (symbol if symbol in rules else f'"{symbol}"') + sign

    lines = [f"{n} ::= {' | '.join(' '.join(shown(*item) for item in each) for each in a)}" for n, a in rules.items()]
    return "\n".join(["root ::= r0", *lines])


def derived(rules, text):
    """Which parts of the text each rule matches: (rule, start, end), grown until nothing is added."""
    known = set()

    def ends(symbol, start):
        if symbol in rules:
            return {end for name, begin, end in known if name == symbol and begin == start}
        return {start + len(symbol)} if text.startswith(symbol, start) else set()

    def repeated(symbol, sign, start):
        here = set() if sign in ("", "+") else {start}
        fresh = ends(symbol, start)
        while not fresh <= here:
            here |= fresh
            fresh = {end for place in here for end in ends(symbol, place)} if sign in ("*", "+") else set()
        return here

    before = -1
    while before < len(known):
        before = len(known)
        for name, alternatives in rules.items():
            for start in range(len(text) + 1):
                for items in alternatives:
                    here = {start}
                    for symbol, sign in items:
                        here = {end for place in here for end in repeated(symbol, sign, place)}
                    known |= {(name, start, end) for end in here}
    return ("r0", 0, len(text)) in known


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(150), 50))
def test_random_rules_match_what_can_be_derived_from_them(seed):
    rules = random_rules(Random(seed))
    assert_same(written(rules), lambda text: derived(rules, text), "ab", 5)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(200, 350), 20))
def test_followed_byte_by_byte_random_rules_match_the_same(seed):
    rules = random_rules(Random(seed))
    place = started(ebnf(written(rules)))

    def takes(text):
        count = next((at for at, char in enumerate(text) if not place.accept(ord(char))), len(text))
        is_taken = count == len(text) and place.is_accepting
        place.rollback(count)
        return is_taken

    assert [text for text in strings("ab", 6) if takes(text) != derived(rules, text)] == []


AMBIGUOUS = (
    'root ::= root root | "a"',
    'root ::= root root | "a" | ""',
    "root ::= [ab]+ | root root",
    'root ::= x\nx ::= x y | "a"\ny ::= x | "b"',
    'root ::= "a" root root | "a"',
    'root ::= "a" root root | ""',
    'root ::= root op root | "a"\nop ::= "+" | ""',
    'root ::= root "a" root | "b" | ""',
    'root ::= "a" root | "a" root "e" root | "x"',
    'root ::= "a" root? root? "b"? | "a"',
    'root ::= "a" root root root | "a" | "b"',
    'root ::= x{1,300}\nx ::= "a"{1,300}',
    'root ::= (("a"{1,20}){1,20}){1,20}',
    'root ::= (x{1,50} "b"?){1,50}\nx ::= "a"{1,50}',
)


def test_an_output_of_an_ambiguous_grammar_may_be_long():
    died = {}
    for grammar in AMBIGUOUS:
        place = started(ebnf(grammar))
        mask = np.zeros(-(-VOCABULARY.size // 32), dtype=np.uint32)
        try:
            for _ in range(1_200):
                place.fill_mask(mask)
                assert place.accept(ord("a"))
        except GrammarError as error:
            died[grammar] = str(error)
    assert died == {}


def test_an_output_that_takes_too_long_to_follow_is_brought_to_its_end():
    place = started(ebnf('root ::= "c" x "d"\nx ::= "a" x{0,40} | "b"'))
    mask = np.zeros(-(-VOCABULARY.size // 32), dtype=np.uint32)
    text = ""
    while len(text) < 1_200 and not text.endswith("d"):
        place.fill_mask(mask)
        allowed = [letter for letter in "acd" if mask[ord(letter) // 32] >> (ord(letter) % 32) & 1]
        text += allowed[0]
        assert place.accept(ord(allowed[0]))
    assert re.fullmatch("ca+d", text)  # which fits the grammar
    assert len(text) > 20


@pytest.mark.parametrize(
    ("grammar", "lark"),
    [
        (
            'root ::= root "+" term | term\nterm ::= [0-9]+ | "(" root ")"',
            'start: start "+" t | t\nt: N | "(" start ")"',
        ),
        ('root ::= root "," [0-9] | [0-9]', 'start: start "," D | D'),
        ('root ::= x "1"\nx ::= y "(" | "+"\ny ::= x "," | root', 'start: x "1"\nx: y "(" | "+"\ny: x "," | start'),
        ('root ::= root root | "(" root ")" | "1"', 'start: start start | "(" start ")" | "1"'),
    ],
)
def test_the_language_is_that_of_llguidance_which_reads_left_recursion_as_it_is(grammar, lark):
    lark += "\nN: /[0-9]+/\nD: /[0-9]/\n"
    language = ebnf(grammar)
    wrong = [text for text in strings("1+,()", 4) if matches(language, text) != llguidance_takes(lark, text)]
    assert wrong == []


def test_a_list_that_is_written_with_left_recursion_is_a_regular_expression():
    assert not ebnf('root ::= root "," [0-9]+ | [0-9]+').rules


def ring(number):
    rules = [f'r{at} ::= r{(at + 1) % number} "a" | "b"' for at in range(number)]
    return "\n".join(["root ::= r0", *rules])


def test_as_many_rules_as_the_limit_may_call_each_other_first_and_more_are_refused():
    language = ebnf(ring(MAX_GROUP))
    assert all(matches(language, text) for text in ("b", "ba", "b" + "a" * 45))
    assert not matches(language, "bb")
    with pytest.raises(GrammarError, match=rf"{MAX_GROUP + 1} rules call each other.*at most {MAX_GROUP}"):
        ebnf(ring(MAX_GROUP + 1))
