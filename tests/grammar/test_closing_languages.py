"""What it takes to come to an end: compared with all texts of small languages. Masks: compared with llguidance's."""

from __future__ import annotations

import functools
import itertools
import json
import random

import numpy as np
import pytest
from closing_places import ENGINE, FAR, closing_of, compiler_of, follow_both, letters, place_behind, restrict
from matching import matches
from random_schemas import document
from samples import some

from tureen.grammar import GrammarError, GrammarSpec, language_of
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Language,
    Not,
    Repeat,
    RuleCall,
    Text,
)
from tureen.kernels.cpu import native


def ab(pattern):
    return language_of(GrammarSpec("regex", pattern))


def ebnf(text):
    return language_of(GrammarSpec("ebnf", text))


NESTED = Language(RuleCall("n"), {"n": Choice((Text("b"), Chain((Text("("), RuleCall("n"), Text(")")))))})
LISTS = Language(
    RuleCall("list"),
    {
        "list": Chain((Text("("), Choice((Text(""), Chain((RuleCall("item"), RuleCall("more"))))), Text(")"))),
        "more": Choice((Text(""), Chain((Text(","), RuleCall("item"), RuleCall("more"))))),
        "item": Choice((Text("a"), RuleCall("list"))),
    },
)
NOT_AB = Language(Both(Repeat(Chars(((97, 98),)), 1, 4), Not(Chain((ANYTHING, Text("ab"), ANYTHING)))))
COUNTED = Language(Chain((Text("("), Repeat(Choice((Text("a"), Text("bb"))), 2, 900), Text(")"))))
MANY = Language(Chain((Repeat(Choice((Text("a"), Text("aa"))), 0, 700), Text("b"))))

SMALL = {
    "words": (ab("qzx|information|inform"), letters("qzxinformat", "inform", "ation", "information"), 11),
    "words of letters only": (ab("(ab|ba)*a?"), letters("ab", "aba", "bab"), 7),
    "a counted part": (ab("a{2,4}b{1,3}"), letters("ab", "aa", "ab", "bb", "aab"), 7),
    "needed many times": (ab("(ab){3}|b{5}"), letters("ab", "ba", "bbbb", "aba"), 6),
    "one of each": (ab("(a|b(a|b))(,(a|b(a|b))){1,2}"), letters("ab,", "a,", ",b", "ba"), 8),
    "a complement": (NOT_AB, letters("ab", "aa", "bb", "ba"), 4),
    "parentheses": (NESTED, letters("ab()", "(b", "((", "((("), 7),
    "lists": (LISTS, letters("a(),", "(a", ",(", "()"), 7),
    "counted by a counter": (COUNTED, letters("ab()", "bb", "aa", "(a"), 7),
    "matched in many ways": (MANY, letters("ab", "aa", "ab", "aab"), 6),
    "recursion that ends": (ebnf('root ::= "a" root "b" | "ab"'), letters("ab", "aa"), 8),
}


def texts_of(language, chars, longest):
    every = ("".join(text) for size in range(longest + 1) for text in itertools.product(chars, repeat=size))
    return [text for text in every if matches(language, text)]


def fewest(tokens, text):
    """How few tokens write a text."""
    best = [0] + [FAR] * len(text)
    for end in range(1, len(text) + 1):
        best[end] = min((best[end - len(t)] + 1 for t in tokens if text[:end].endswith(t)), default=FAR)
    return best[-1]


@functools.cache
def every_state(name):
    """Each beginning of a text, with how few tokens end it, by all texts of the language up to some length."""
    language, tokens, longest = SMALL[name]
    words = [token.decode() for token in tokens]
    chars = sorted({char for word in words for char in word})
    if longest > 8:  # a finite language
        texts = [text for text in ("qzx", "inform", "information") if matches(language, text)]
    else:
        texts = texts_of(language, chars, longest)
    ends = {}
    for text in texts:
        for at in range(len(text) + 1):
            ends[text[:at]] = min(ends.get(text[:at], FAR), fewest(words, text[at:]))
    return language, tokens, words, ends


@pytest.mark.parametrize("name", SMALL)
def test_every_state_of_a_small_language_is_as_far_from_its_end_as_all_its_texts_say(name):
    language, tokens, words, ends = every_state(name)
    closing = closing_of(language, tokens)
    assert closing.least == ends[""]
    for text, least in ends.items():
        place = place_behind(closing, [words.index(char) for char in text])
        if len(text) <= SMALL[name][2] // 2:  # the longest texts' own ends are longer than what was written out
            assert place.cost == least, text


@pytest.mark.parametrize("name", SMALL)
def test_from_every_state_tokens_lead_to_an_end_of_the_language_each_a_step_nearer(name):
    language, tokens, words, ends = every_state(name)
    closing = closing_of(language, tokens)
    for text in ends:
        written = [words.index(char) for char in text]
        place = place_behind(closing, written)
        while (cost := place.cost) > 0:
            token_id = next(i for i in range(len(tokens)) if place.num_closing([i], cost) == 1)
            place.accept(token_id)
            written.append(token_id)
        assert matches(language, "".join(words[token_id] for token_id in written)), text


OTHERS = [
    ("regex", "(ab|a)(c|bcd)*d?"),
    ("regex", r"\d{3}-[^\W\d]{2,5}"),
    ("regex", "(?i:yes|no)[.!]?"),
    ("regex", "(a+b){2,}c{0,3}"),
    ("regex", "[é-ü]{2}|🙂+"),
    ("regex", "(a|aa){0,90}b"),
    ("regex", "((a{3,50}|b){2,40}c)?"),
    ("regex", "(a?b?){2,70}x"),
    ("regex", "(?=.*a)[a-c]{4,9}"),
    ("regex", "(?!ab)[a-c]+"),
    ("regex", "[a-c]{40,400}"),
    ("ebnf", 'root ::= "(" root ")" root | "x"'),
    ("ebnf", 'root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"'),
    ("ebnf", 'root ::= "a" root "a" | "b" root "b" | ""'),
    ("json_schema", "$$ANY$$"),
    ("choice", json.dumps([f"item {number}" for number in range(300)])),
]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(40), 12))
def test_masks_of_random_schemas_are_those_of_llguidance(seed):
    dice = random.Random(seed)
    spec = GrammarSpec("json_schema", json.dumps(document(dice)))
    try:
        language = language_of(spec)
    except GrammarError:
        return
    assert follow_both(language, dice) > 0


@pytest.mark.parametrize(("kind", "text"), OTHERS)
def test_masks_of_other_constraints_are_those_of_llguidance(kind, text):
    for seed in range(3):
        follow_both(language_of(GrammarSpec(kind, text)), random.Random(seed))
    follow_both(language_of(GrammarSpec(kind, text, "</t>")), random.Random(7))


def allowed_behind(text, tokens, pattern, left, most=400, ends=()):
    """The tokens that are left of all, behind a text written letter by letter, and what the limit has to do with it."""
    words = [*letters("".join(sorted({*text, *"abc .x"}))), *(token.encode() for token in tokens)]
    place = place_behind(closing_of(ab(pattern), words), [words.index(char.encode()) for char in text])
    mask = np.full(-(-(len(words) + 1) // 32), 0xFFFFFFFF, dtype=np.uint32)
    nearness = restrict(place, mask, left, most)
    return {word.decode() for at, word in enumerate(words) if mask[at // 32] >> at % 32 & 1}, nearness


TEXT = "[abc .]*x"


def test_far_from_the_limit_nothing_is_taken():
    allowed, nearness = allowed_behind("abc", [" ab", "ab"], TEXT, 100)
    assert {" ab", "ab", "x", "."} <= allowed
    assert nearness == (False, None)


def test_with_few_tokens_to_spare_no_further_sentence_is_begun():
    assert " ab" in allowed_behind("abc", [" ab"], TEXT, 30)[0]
    allowed, nearness = allowed_behind("abc.", [" ab"], TEXT, 30)
    assert allowed == {"x"}
    assert nearness == (True, None)


def test_with_fewer_tokens_to_spare_no_further_word_is_begun_but_the_last_one_is_finished():
    allowed, nearness = allowed_behind("abc", [" ab", "ab"], TEXT, 9)
    assert allowed == {"a", "b", "c", "ab", "x"}
    assert nearness.is_near
    assert nearness.ending is not None


def test_with_nothing_to_spare_it_ends():
    assert allowed_behind("abc", [" ab", "ab"], TEXT, 1)[0] == {"x"}
    assert allowed_behind("abc", [" ab", "ab"], "[abc ]*xx", 2)[0] == {"x"}


def test_the_room_for_words_and_sentences_is_a_part_of_a_short_limit():
    assert " ab" in allowed_behind("abc.", [" ab"], TEXT, 12, most=40)[0]
    assert " ab" not in allowed_behind("abc.", [" ab"], TEXT, 11, most=40)[0]
    assert " ab" in allowed_behind("abc", [" ab"], TEXT, 7, most=40)[0]
    assert " ab" not in allowed_behind("abc", [" ab"], TEXT, 6, most=40)[0]


def test_what_opens_more_than_there_is_room_for_is_taken_long_before_the_end():
    pattern = "[abc ]*(x|[.](abc){90}x)"
    assert "." in allowed_behind("ab", [], pattern, 272)[0]
    assert "." not in allowed_behind("ab", [], pattern, 271)[0]


def test_the_vocabulary_is_looked_through_once_for_all_places_in_a_counted_text():
    words = [*letters("abc ()"), *(f" {word}".encode() for word in ("ab", "cab", "bab"))]
    compiler = compiler_of(words)
    follower = native.require().Follower(compiler.translate(ab("[(][abc ]{0,900}[)]")), compiler._trie)
    place = native.require().Place(follower)
    assert place.accept(words.index(b"("))
    walked = []
    for char in "abc abc ab":
        assert place.accept(words.index(char.encode()))
        mask = np.full(1, 0xFFFFFFFF, dtype=np.uint32)
        place.fill(mask)
        place.restrict(mask, 500, 8, 32)
        walked.append(follower.num_walked)
    assert walked[0] > 0
    assert set(walked) == {walked[0]}


def test_a_token_over_the_end_of_a_part_that_calls_itself_is_not_counted_on():
    """There the least is an upper bound: a shorter end may exist, and the one that is counted on always does."""
    tokens = letters("ab()", "))", ")))")
    assert closing_of(NESTED, letters("ab()")).least == 1
    place = place_behind(closing_of(NESTED, tokens), [2, 2, 2, 1])
    assert place.cost == 3
    assert place.num_closing([5], 1) == 1


def test_what_cannot_be_written_with_these_tokens_is_not_closed():
    assert closing_of(ab("a|bc"), letters("bc")).least == 2
    assert closing_of(ab("abc"), letters("bc")).least is None


def many_ways(count):
    return Language(Choice(tuple(Chain((ANY_CHAR, Text(chr(0x4E00 + index)))) for index in range(count))))


def test_a_language_with_thousands_of_ways_to_go_on_at_once_is_followed():
    place = ENGINE.load(ENGINE.translate(many_ways(9_000))).start()
    assert all(map(place.accept, "é\u4e07".encode()))
    assert place.is_done


def test_what_another_version_wrote_is_refused():
    program = ENGINE.translate(language_of(GrammarSpec("regex", "a+")))
    assert ENGINE.load(program).least == 1
    for wrong in (program[:-4], b"\1\0\0\0\xff\xff\xff\xff" + program[8:], b""):
        with pytest.raises(ValueError, match="version"):
            ENGINE.load(wrong)
