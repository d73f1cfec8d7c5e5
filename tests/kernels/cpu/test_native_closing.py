"""The native half of constraints: what comes from another process or from a client's grammar breaks nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tureen.grammar import GrammarSpec
from tureen.grammar.expression import (
    ANYTHING,
    Both,
    Chain,
    Chars,
    Choice,
    Expression,
    Language,
    Not,
    Repeat,
    RuleCall,
    Text,
)
from tureen.grammar.frontends import language_of
from tureen.grammar.guard.facts import (
    CountedItems,
    FixedStep,
    FreeStep,
    GuardFacts,
    GuardNode,
    KeySet,
    KeyStep,
    ValueStep,
    Variant,
)
from tureen.grammar.guard.guarded import KINDS
from tureen.grammar.tree import encoded
from tureen.kernels.cpu import native

kernels = native.load()
if kernels is None:
    pytest.skip("no native kernels", allow_module_level=True)

TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"((", b"))", b"a,", b"", b"ab"]
TRIE = kernels.Trie.of(TOKENS, [], len(TOKENS), 1 << 20)
DIGITS = Chars(((48, 57), (233, 0x10FFFF)))
LANGUAGES = {
    "rules": Language(RuleCall("r"), {"r": Choice((Text("a"), Chain((Text("("), RuleCall("r"), Text(")")))))}),
    "counts": Language(Chain((Repeat(Chain((DIGITS, Text(","))), 200, 900), Repeat(Text("a"), 3, 5)))),
    "complement": Language(Both(Repeat(DIGITS, 1, 9), Not(Chain((ANYTHING, Text("42"), ANYTHING))))),
    "the empty text": Language(Text("")),
    "branches": Language(
        RuleCall("r"),
        {"r": Choice((Text("a"), Chain((Text("("), RuleCall("r"), Text(")"))))), "s": Repeat(DIGITS)},
        branches=(RuleCall("r"), Chain((RuleCall("s"), RuleCall("r")))),
    ),
}


def tree_of(name):
    return encoded(LANGUAGES[name], kernels)


def follow(program, dice, steps=40):
    """Draws random tokens with random limits; each stays within what is left."""
    place = kernels.Place(kernels.Follower(program, TRIE))
    mask = np.zeros(-(-len(TOKENS) // 32), dtype=np.uint32)
    for _ in range(steps):
        cost = place.cost()
        left = min(cost + dice.randrange(60), 1 << 20)
        place.fill(mask)
        place.restrict(mask, left, 8, 32)
        allowed = [i for i in range(len(TOKENS)) if mask[i // 32] >> i % 32 & 1 and place.num_closing([i], left) == 1]
        if not allowed:
            return cost
        place.accept(dice.choice(allowed))
        if dice.random() < 0.2:
            place.accept(dice.choice(allowed))
            place.cost()
            place.rollback(1)
        assert place.cost() < left
    return 0


@pytest.mark.parametrize("name", LANGUAGES)
def test_random_outputs_stay_within_what_is_left_and_stop_only_where_they_are_whole(name):
    program = kernels.closing_program(tree_of(name), TRIE)
    for seed in range(8):
        assert follow(program, random.Random(seed)) == 0


@pytest.mark.parametrize("name", LANGUAGES)
def test_programs_and_trees_with_a_wrong_bit_are_refused_or_are_others(name):
    dice = random.Random(2)
    program, tree = kernels.closing_program(tree_of(name), TRIE), tree_of(name).tobytes()
    mask, num_refused = np.zeros(-(-len(TOKENS) // 32), dtype=np.uint32), 0
    for _ in range(150):
        broken = bytearray(program)
        broken[dice.randrange(len(broken))] ^= 1 << dice.randrange(8)
        try:
            place = kernels.Place(kernels.Follower(bytes(broken), TRIE))
            for token_id in (*b"(", *place.forced(9), *b"aa42,", 256, 257):
                place.cost()
                place.fill(mask)
                place.accept(token_id)
        except (ValueError, RuntimeError):
            num_refused += 1
        broken = bytearray(tree)
        broken[dice.randrange(len(broken))] ^= 1 << dice.randrange(8)
        try:
            kernels.closing_program(np.frombuffer(broken, dtype=np.int32), TRIE)
        except (ValueError, RuntimeError):
            num_refused += 1
    assert num_refused > 50


FACTS = GuardFacts(
    nodes=(
        GuardNode(is_unique=True, items=1, first_items=(2,), arrays=(Variant(0, 0), Variant(1, -1))),
        GuardNode(least_keys=2, keys={"a": 0}, others=2, key_sets=((KeySet((((97, 98, 0),),), (True,)), 3),)),
        GuardNode(step=(7, 1), bounds=("0", None)),
        GuardNode(count=CountedItems(1, 2, 3, 5, ((Variant(2, 0, counts=True),),), (Variant(1, -1),))),
    ),
    steps=(
        FixedStep(((b"<", 1), (b"(", 2)), 3),
        KeyStep((b">", b"/"), {"a": (2, 2)}, (3, 2)),
        ValueStep(0, 3, 0),
        FreeStep(((b"<", 0),), 9, (b"ab",)),
    ),
)


def corrupted(value: Any, dice: random.Random) -> Any:
    """Return plain data in which one number or text has become another one, or a list has lost or doubled an item."""
    if isinstance(value, dict):
        return {key: corrupted(item, dice) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        return [*value[:at], corrupted(value[at], dice), *value[at + 1 :]]
    if isinstance(value, (list, tuple)):
        return value[: len(value) // 2] if dice.random() < 0.5 else [*value, *value]
    if isinstance(value, bool) or value is None:
        return not value
    return dice.choice([-3, -1, 0, 1, 4, 1 << 40, 1 << 70]) if isinstance(value, int) else value[1:]


def test_facts_of_a_guard_with_a_wrong_number_are_refused_or_are_others():
    program = kernels.closing_program(encoded(Language(ANYTHING, branches=(ANYTHING,)), kernels), TRIE)
    follower, tokens = kernels.Follower(program, TRIE), kernels.GuardTokens(TRIE)
    mask, dice, num_refused, num_followed = np.zeros(-(-len(TOKENS) // 32), dtype=np.uint32), random.Random(4), 0, 0
    plain = msgspec.to_builtins(FACTS)
    for _ in range(1500):
        try:
            facts = msgspec.convert(corrupted(plain, dice), GuardFacts)
        except msgspec.ValidationError:  # it never arrives
            continue
        try:
            native_facts = kernels.GuardFacts.of(facts, KINDS, follower)
            guard = kernels.Guard(native_facts, tokens, follower, lambda *_: dice.random() < 0.9)
            for token in dice.choice((b'<a>[{"a": [1, 1], "b": 14', b'(["ab", 2, {"a":', b"<b/[1]ab<", b"ababab<a")):
                guard.fill(mask)
                guard.accept(token)
        except (ValueError, RuntimeError):
            num_refused += 1
        num_followed += 1
    assert 50 < num_refused < num_followed - 50


LETTERS = Chars(((97, 99),))


def without_many_words(num_times: int) -> Language:
    """A long text that contains none of many words. Each letter of a word is one of 13."""
    dice = random.Random(1)

    def word() -> Chain:
        return Chain(
            tuple(Chars(tuple((char, char) for char in sorted(dice.sample(range(97, 123), 13)))) for _ in range(30))
        )

    whole: Expression = Text("".join(chr(dice.randrange(97, 123)) for _ in range(30_000)))
    for _ in range(num_times):
        whole = Both(whole, Not(Chain((ANYTHING, Choice(tuple(word() for _ in range(100))), Text("!")))))
    return Language(whole)


LARGE = {
    "much work in each state of two parts": without_many_words(2),
    "a long repeat": Language(Not(Repeat(Choice((Text("ab"), Text("c"))), 0, 2_000_000))),
    "many states": Language(
        Both(Repeat(LETTERS), Not(Chain((ANYTHING, Text("a"), Repeat(LETTERS, 30, 30)))))  # each of 30 letters counts
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_grows_too_large_is_refused(name):
    with pytest.raises(RuntimeError, match="too"):
        kernels.closing_program(encoded(LARGE[name], kernels), TRIE)


def test_what_is_large_by_itself_compiles_with_what_makes_it_small():
    # for texts of all characters, the first part takes several states for each byte of a character
    language = language_of(GrammarSpec("regex", "(?!.*a.{14}b)[a-z]*"))
    place = kernels.Place(kernels.Follower(kernels.closing_program(encoded(language, kernels), TRIE), TRIE))
    assert all(place.accept(ord(char)) for char in "xa" + 14 * "c")
    assert not place.accept(ord("b"))
    assert place.accept(ord("c"))
    assert place.accept(ord("b"))


def test_conditions_with_the_same_part_are_as_large_together_as_each_may_be_by_itself():
    far = Chain((ANYTHING, Text("a"), Repeat(LETTERS, 25, 25)))  # 26 letters count
    wrong = Not(Choice((far, Chain((ANYTHING, Text("d"))))))
    starts = [Text(4 * "".join(letters)) for letters in itertools.product("ab", repeat=4)]
    more = Chain((Repeat(Chars(((97, 98),)), 14, 14), Text("d")))
    parts = [Both(Chain((start, more)), wrong) for start in starts]  # 30,000 states each, none of which can end
    program = kernels.closing_program(encoded(Language(Choice((*parts, Text("c")))), kernels), TRIE)
    follower = kernels.Follower(program, TRIE)
    mask = np.zeros(-(-len(TOKENS) // 32), dtype=np.uint32)
    kernels.Place(follower).fill(mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [ord("c")]


def test_where_all_languages_keep_much_those_used_longest_ago_forget_and_go_on_as_before():
    trie = kernels.Trie.of(TOKENS, [], len(TOKENS), 3_000)
    digits = [kernels.closing_program(tree_of("counts"), TRIE) for _ in range(12)]
    places = [kernels.Place(kernels.Follower(program, trie)) for program in digits]
    masks = np.zeros((2, -(-len(TOKENS) // 32)), dtype=np.uint32)
    kept = []
    for number in range(60):  # all outputs in turn, a character each
        for place in places:
            assert place.accept(b"1,"[number % 2])
            place.fill(masks[0])
            kept.append(trie.num_kept)
    assert min(kept[-400:]) < 2_000 < max(kept) <= 3_200
    for place in places:  # what was forgotten is found again
        place.fill(masks[1])
        assert (masks[0] == masks[1]).all()
    del places, place
    assert trie.num_kept == 0


def laborious(trie):
    """A language in which each further "a" takes more work."""
    rules = {"s": Choice((Chain((Text("a"), Repeat(RuleCall("s"), 0, 40))), Text("b")))}
    return kernels.Follower(kernels.closing_program(encoded(Language(RuleCall("s"), rules), kernels), TRIE), trie)


def other_language(trie):
    return kernels.Place(kernels.Follower(kernels.closing_program(tree_of("counts"), TRIE), trie))


def accept_all(place, text):
    for byte in text:
        assert place.accept(byte)


def test_a_language_that_took_too_much_work_forgets_for_others_and_is_followed_again():
    trie = kernels.Trie.of(TOKENS, [], len(TOKENS), 20_000)
    follower, other = laborious(trie), other_language(trie)
    with pytest.raises(RuntimeError, match="too long to follow"):
        accept_all(kernels.Place(follower), b"a" * 3_000)
    assert other.accept(ord("1"))
    assert trie.num_kept < 20_000
    assert kernels.Place(follower).accept(ord("a"))


def test_an_output_whose_states_were_forgotten_goes_on_however_much_work_its_beginning_took():
    trie = kernels.Trie.of(TOKENS, [], len(TOKENS), 20_000)
    place, other = kernels.Place(laborious(trie)), other_language(trie)
    accept_all(place, b"a" * 60)
    kept = trie.num_kept
    assert other.accept(ord("1"))
    assert trie.num_kept < kept / 2
    assert place.accept(ord("a"))


def test_a_language_that_one_output_has_filled_is_followed_from_its_beginning_by_others():
    long = Language(Choice((Repeat(LETTERS, 0, 450_000), Chain((Text("X"), Repeat(DIGITS, 0, 400_000))))))
    follower = kernels.Follower(kernels.closing_program(encoded(long, kernels), TRIE), TRIE)
    with pytest.raises(RuntimeError, match="too many ways"):
        accept_all(kernels.Place(follower), b"a" * 450_000)
    for _ in range(3):
        place = kernels.Place(follower)
        assert [place.accept(byte) for byte in b"X1Xa"] == [True, True, False, False]
        assert place.cost() == 0
