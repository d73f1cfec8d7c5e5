"""Texts of a pattern with a largest length: what it takes to come to an end, near and far from that length."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
from closing_places import ENGINE, FAR, closing_of, compiler_of, follow_both, letters, place_behind, restrict

from tureen.grammar import GrammarSpec, language_of
from tureen.grammar.expression import Both, Chain, Chars, Choice, Language, Repeat, Text
from tureen.kernels.cpu import native

MORE = 4
"""Tokens of which every sequence is tried as the rest of a text."""

MOST = 210
"""Characters: too many to be written out."""

ESCAPED = Choice((Chars(((97, 122),)), Chain((Text("\\"), Chars(((97, 122),))))))

# The characters of tokens, more tokens, what is one of the counted parts (as an expression and for `re`), how many of
# them there are at least, a pattern, what many texts of it begin with.
LANGUAGES = {
    "one way": ("ab", ["aa", "ab", "bab"], Chars(((97, 98),)), "[ab]", 0, "(ab|b)*", "ab"),
    "a way of fewer tokens is longer": ("axyz", ["yyyy", "aa"], Chars(((97, 122),)), "[a-z]", 0, "a*(xz|yyyyz?)", "a"),
    "three ways": ("axyz", ["yyyy", "zzz"], Chars(((97, 122),)), "[a-z]", 0, "a*(x|y{4}(zzz)?x|(zzz)*)z", "a"),
    "characters of two bytes": ("ab\\", ["\\b", "aa", "ab"], ESCAPED, r"\\?[a-z]", 0, r"(a|ab|\\b)*(\\ba|ab)", r"\b"),
    "shorter in bytes but not in characters": ("ab\\", ["\\a"], ESCAPED, r"\\?[a-z]", 0, r"a*(\\b\\b|aaa|bbb)", "a"),
    "a least length": ("abx", ["aa", "aba"], Chars(((97, 122),)), "[a-z]", 206, "[ab]*x?", "ab"),
    "fixed in steps": ("abc", ["abc", "bc"], Chars(((97, 122),)), "[a-z]", 0, "(abc)*", "abc"),
}


def language(name):
    _, _, item, _, least, pattern, _ = LANGUAGES[name]
    inside = language_of(GrammarSpec("regex", pattern)).start
    return Language(Both(Repeat(item, least, MOST), inside))


def tokens_of(name):
    chars, words = LANGUAGES[name][:2]
    return letters(chars, *words)


def is_in(name, text):
    _, _, _, item, least, pattern, _ = LANGUAGES[name]
    return re.fullmatch(pattern, text) is not None and least <= len(re.findall(item, text)) <= MOST


def fewest_to_end(name, text, longest):
    """How few tokens complete a text, with so many of them at most, by trying all; FAR where none do."""
    words = [token.decode() for token in tokens_of(name)]
    for size in range(longest + 1):
        for more in itertools.product(words, repeat=size):
            if is_in(name, text + "".join(more)):
                return size
    return FAR


def beginnings(name, dice):
    """Random texts of nearly the largest length, that are as the pattern says or have just ceased to be."""
    chars, _, _, item, _, _, filler = LANGUAGES[name]
    for _ in range(40):
        room = dice.randrange(7)
        text = filler * MOST
        units = re.findall(item, text)[: MOST - room]
        tail = "".join(dice.choice(chars) for _ in range(dice.randrange(3)))
        yield "".join(units[: len(units) - len(tail)]) + tail


@pytest.mark.parametrize("name", LANGUAGES)
def test_near_the_largest_length_a_text_is_as_far_from_its_end_as_all_its_ends_say(name):
    closing = closing_of(language(name), tokens_of(name))
    chars = LANGUAGES[name][0]
    counts = {True: 0, False: 0}
    for text in beginnings(name, random.Random(name)):
        least = fewest_to_end(name, text, MORE)
        place = place_behind(closing, [chars.index(char) for char in text])
        if least < FAR:
            assert place.cost == least, text[-12:]
        else:
            assert place is None or place.cost > MORE, text[-12:]
        counts[least < FAR] += 1
    assert counts[True] > 5


@pytest.mark.parametrize("name", LANGUAGES)
def test_outputs_with_random_limits_are_texts_of_the_language_within_their_limit(name):
    tokens = tokens_of(name)
    closing = closing_of(language(name), tokens)
    dice = random.Random(name)
    for _ in range(30):
        most = closing.least + dice.choice([0, 1, 2, 5, 30, 150, 400])
        place = closing.start()
        text = ""
        for left in range(most, -1, -1):
            mask = np.full(1, 0xFFFFFFFF, dtype=np.uint32)
            restrict(place, mask, left, most if dice.random() < 0.5 else 0)
            may_end = is_in(name, text)
            allowed = [i for i in range(len(tokens)) if mask[0] >> i & 1 and place.num_closing([i], FAR) == 1]
            if may_end and (not allowed or left == 0 or dice.random() < 0.01):
                break
            token_id = dice.choice(allowed)
            place.accept(token_id)
            text += tokens[token_id].decode()
        assert is_in(name, text)


PATTERNS = [
    ("^[a-z]{2}-(x|yy|zzz)+[0-9]*$", 0, 24),
    ("^(ab|ba|é)*(-[0-9a-f]{4})?$", 3, 30),
    ('^[a"]+(\\\\.[a"]+)*$', 0, 40),
    ("^(?!ab)[abc.]*$", 0, 90),
    ("^arn:[a-z]*:[^:]*(:[0-9]+)?$", 10, 40),
    ("^.*a.{2}$", 5, 40),
]


@pytest.mark.parametrize(("pattern", "least", "most"), PATTERNS)
def test_masks_of_patterns_with_lengths_are_those_of_llguidance(pattern, least, most):
    spec = json.dumps({"type": "string", "pattern": pattern, "minLength": least, "maxLength": most})
    for seed in range(6):
        follow_both(language_of(GrammarSpec("json_schema", spec)), random.Random(seed), steps=60)


def test_a_pattern_with_a_large_length_takes_no_more_room_than_with_a_small_one():
    def size_of(most):
        schema = json.dumps({"type": "string", "pattern": "^arn:[a-z-]+:[^:]*(:[0-9]{12})?:.+$", "maxLength": most})
        program = ENGINE.translate(language_of(GrammarSpec("json_schema", schema)))
        return native.require().Follower(program, ENGINE._trie).num_instructions

    assert size_of(300) == size_of(20_000)


def test_an_alternative_with_a_length_of_its_own_needs_no_automaton_for_the_largest_length():
    def size_of(pattern):
        schema = json.dumps({"type": "string", "pattern": pattern, "maxLength": 163})
        return len(ENGINE.translate(language_of(GrammarSpec("json_schema", schema))))

    searched = size_of("groups:Name")
    assert size_of("^[\\p{L}0-9]{1,128}$|groups:Name") < 2 * searched + size_of("^[\\p{L}0-9]{1,128}$")


def test_a_mask_far_from_the_largest_length_needs_no_state_for_each_character_of_a_token():
    schema = json.dumps({"type": "string", "pattern": "^arn:[a-z-]+:[^:]*$", "maxLength": 2000})

    def num_kept(longest):
        compiler = compiler_of([*(bytes([byte]) for byte in range(256)), b"a" * longest])
        compiled = compiler.load(compiler.translate(language_of(GrammarSpec("json_schema", schema))))
        place_behind(compiled, b'"arn:a').fill_mask(np.zeros(9, dtype=np.uint32))
        return compiled.follower.num_kept

    assert num_kept(200) < 1.5 * num_kept(2)


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [(None, 0, 90), (None, 30, 90), ("^[w-z][a-z]*", 0, 200), ("^(?!.?a)", 9, 200), ("z$", 5, 40), ("^x*z*$", 0, 70)],
)
def test_plain_characters_are_counted_alike_far_from_the_bounds_and_near_them(pattern, least, most):
    """Whatever the order in which lengths are visited: what is known of one of them is used for others."""
    schema = {"type": "string", "minLength": least, "maxLength": most} | ({"pattern": pattern} if pattern else {})
    runs = [letter * size + end for letter in "xz" for size in range(1, 14) for end in ("", '"', "é")]
    compiler = compiler_of([*(bytes([byte]) for byte in range(256)), *(run.encode() for run in runs)])
    program = compiler.translate(language_of(GrammarSpec("json_schema", json.dumps(schema))))

    def can_be(text):
        inside = text.rstrip('"')
        ends = [""] if text.endswith('"') else ["z" * more for more in range(most + 1)]
        return any(least <= len(inside + end) <= most and re.search(pattern or "", inside + end) for end in ends)

    sizes = [size for size in range(most + 1) if can_be("x" * size)]
    shuffled = random.Random(most).sample(sizes, len(sizes))
    for order in (sizes, shuffled):
        compiled = compiler.load(program)
        for size in order:
            mask = np.zeros(-(-compiler.vocabulary.size // 32), dtype=np.uint32)
            place_behind(compiled, b'"' + b"x" * size).fill_mask(mask)
            allowed = [run for number, run in enumerate(runs, 256) if mask[number // 32] >> np.uint32(number % 32) & 1]
            assert allowed == [run for run in runs if can_be("x" * size + run)], size


def test_a_mask_near_the_largest_length_needs_only_one_state_for_each_plain_character():
    """If each length is explored anew, it needs three more states for the bytes of longer characters."""
    compiler = compiler_of([*(bytes([byte]) for byte in range(256)), b"a" * 200])

    def num_kept(left):
        schema = json.dumps({"type": "string", "maxLength": 300 + left})
        compiled = compiler.load(compiler.translate(language_of(GrammarSpec("json_schema", schema))))
        place = place_behind(compiled, b'"' + b"x" * 300)
        before = compiled.follower.num_kept
        place.fill_mask(np.zeros(9, dtype=np.uint32))
        return compiled.follower.num_kept - before

    one_state = 16  # num_kept counts it with its transitions
    assert num_kept(100) - num_kept(50) <= 1.2 * 50 * one_state


def test_parts_that_cannot_be_told_apart_are_counted_all_the_same():
    """ "aaa" is one part, two or three: all of them are written out."""
    part = Choice((Text("a"), Text("aa")))
    text = Language(Both(Repeat(part, 100, 120), Repeat(Choice((Text("aaa"), Text("b"))))))
    place = place_behind(closing_of(text, letters("ab", "aaa")), [0] * 230)
    assert place.cost == 1  # 231 in 77 times 3
    assert place.num_closing([1], FAR) == 0
    assert place.num_closing([2], FAR) == 1
