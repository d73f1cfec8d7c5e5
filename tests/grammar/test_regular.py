"""Regular languages: automata, questions about them, and their grammars and expressions without Both and Not."""

import itertools
import random
import re

import pytest
from llguidance_masks.terminals import rules_of
from matching import matches, matches_expression
from samples import some

from tureen.grammar.alphabet import merged
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    EMPTY,
    NOTHING,
    SURROGATES,
    Both,
    Chain,
    Chars,
    Choice,
    GrammarError,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar.regular import (
    Automaton,
    accepts,
    automaton,
    continuations,
    expression_of,
    first_chars,
    includes,
    intersects,
    is_empty,
    is_finite,
    strings_of,
)

TEXTS = ["".join(chars) for length in range(5) for chars in itertools.product("abz", repeat=length)]
EMPTY_LANGUAGE = Automaton(((),), (False,))


def chars(text):
    return Chars(merged((ord(char), ord(char)) for char in text))


LEAVES = (*map(Text, ("a", "b", "ab", "ba", "", "abba")), chars("ac"), chars("bd"), ANY_CHAR, ANYTHING, NOTHING)


def random_tree(rng, depth):
    if not depth or rng.random() < 0.15:
        return rng.choice(LEAVES)
    kind = rng.randrange(10)
    if kind < 5:
        items = tuple(random_tree(rng, depth - 1) for _ in range(rng.randrange(4)))
        return Chain(items) if kind < 3 else Choice(items)
    item = random_tree(rng, depth - 1)
    if kind < 7:
        least = rng.randrange(3)
        return Repeat(item, least, rng.choice([None, least, least + 1, least + 3, max(least, 1)]))
    return Both(item, random_tree(rng, depth - 1)) if kind == 7 else Not(item) if kind == 8 else Terminal(item)


def random_trees(seed, count):
    rng = random.Random(seed)
    return [random_tree(rng, rng.randrange(1, 5)) for _ in range(count)]


def random_words(rng):
    return {"".join(rng.choices("ab", k=rng.randrange(4))) for _ in range(rng.randrange(6))}


def is_plain(node):
    """Whether there is no Both, Not or Call in it."""
    if isinstance(node, Chain | Choice):
        return all(is_plain(item) for item in node.items)
    return is_plain(node.item) if isinstance(node, Repeat) else isinstance(node, Text | Chars)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(4), 2))
def test_automata_accept_what_the_trees_match(seed):
    for tree in random_trees(seed, 60):
        machine = automaton(tree)
        wrong = [text for text in TEXTS if accepts(machine, text) != matches_expression(tree, text)]
        assert not wrong, (tree, wrong)


def test_every_state_is_reached_and_leads_to_acceptance():
    for tree in random_trees(11, 150):
        machine = automaton(tree)
        if machine == EMPTY_LANGUAGE:
            continue
        reached, live = {0}, {state for state, accepting in enumerate(machine.accepting) if accepting}
        for _ in machine.moves:
            reached |= {target for state in reached for _, _, target in machine.moves[state]}
            live |= {state for state, moves in enumerate(machine.moves) if any(move[2] in live for move in moves)}
        assert reached == live == set(range(len(machine.moves)))


def test_moves_are_sorted_disjoint_and_without_surrogates():
    for tree in random_trees(12, 150):
        for moves in automaton(tree).moves:
            spans = [(first, last) for first, last, _ in moves]
            assert all(first <= last for first, last in spans)
            assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
            assert not any(first <= SURROGATES[1] and last >= SURROGATES[0] for first, last in spans)


def test_finite_languages_have_as_many_states_as_different_futures():
    rng = random.Random(5)
    for _ in range(60):
        words = random_words(rng)
        prefixes = {word[:end] for word in words for end in range(len(word) + 1)}
        futures = {frozenset(word[len(prefix) :] for word in words if word.startswith(prefix)) for prefix in prefixes}
        assert len(automaton(Choice(tuple(map(Text, words)))).moves) == max(len(futures), 1)


def test_questions_about_finite_languages_have_the_answers_of_sets():
    rng = random.Random(6)
    for _ in range(150):
        one, other = random_words(rng), random_words(rng)
        first, second = Choice(tuple(map(Text, one))), Choice(tuple(map(Text, other)))
        assert is_empty(first) == (not one)
        assert intersects(first, second) == bool(one & other)
        assert includes(first, second) == (other <= one)
        assert intersects(Not(first), second) == bool(other - one)
        assert not includes(first, Not(second))
        assert strings_of(Both(first, Not(second)), 10) == sorted(one - other, key=lambda word: (len(word), word))


def test_an_expression_is_empty_exactly_if_its_automaton_accepts_nothing():
    trees = random_trees(13, 300)
    empty = [tree for tree in trees if is_empty(tree)]
    assert 20 < len(empty) < 200
    for tree in trees:
        assert is_empty(tree) == (automaton(tree) == EMPTY_LANGUAGE)


def test_first_chars_are_those_of_which_a_match_begins():
    for tree in random_trees(14, 150):
        found = {text[0] for text in TEXTS if text and matches_expression(tree, text)}
        allowed = first_chars(tree)
        assert all(matches_expression(allowed, char) for char in found)
        if strings_of(tree, 100) is not None:
            beginnings = {text[0] for text in strings_of(tree, 100) if text}
            assert beginnings == set(strings_of(allowed, 10))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (Text("abc"), ""),
        (Repeat(Text("a")), "a"),
        (Choice((Text("ab"), Text("abcd"), Text("xyz"))), "c"),
        (Repeat(Text("ab"), 1, 3), "a"),
        (Chain((Repeat(chars("ab")), Text("c"))), ""),
        (Both(Repeat(chars("abc")), Not(Chain((ANYTHING, Text("cc"), ANYTHING)))), "abc"),
        (NOTHING, ""),
    ],
)
def test_continuations_are_what_makes_a_match_longer(tree, expected):
    assert continuations(tree) == chars(expected)


@pytest.mark.parametrize(
    ("tree", "limit", "expected"),
    [
        (Repeat(chars("ab"), 0, 2), 7, ["", "a", "b", "aa", "ab", "ba", "bb"]),
        (Repeat(chars("ab"), 0, 2), 6, None),
        (Repeat(Text("a")), 1000, None),
        (Both(Repeat(Text("a")), Repeat(ANY_CHAR, 2, 3)), 5, ["aa", "aaa"]),
        (ANY_CHAR, 1000, None),
        (NOTHING, 0, []),
        (EMPTY, 1, [""]),
        (Text("\ud800"), 1, []),
    ],
)
def test_strings_of_lists_a_finite_language(tree, limit, expected):
    assert strings_of(tree, limit) == expected


def test_a_language_is_finite_if_its_automaton_has_no_cycle():
    assert is_finite(Repeat(ANY_CHAR, 0, 50))
    assert not is_finite(Repeat(ANY_CHAR, 3))
    assert is_finite(Both(Repeat(ANY_CHAR, 3), Not(Repeat(ANY_CHAR, 9))))


def test_rules_and_expressions_without_both_and_not_are_the_same_language():
    for tree in random_trees(15, 150):
        machine = automaton(tree)
        plain, rules = expression_of(machine), rules_of(machine, "s")
        assert is_plain(plain)
        assert automaton(plain) == machine, tree
        for text in TEXTS[:40]:
            assert matches(rules, text) == matches_expression(plain, text) == accepts(machine, text), (tree, text)


def test_counted_repeats_stay_counted_where_both_is_taken_away():
    lower = Chars(((97, 122),))
    assert expression_of(automaton(Both(Repeat(lower), Repeat(ANY_CHAR, 3, 500)))) == Repeat(lower, 3, 500)


def test_an_intersection_of_patterns_as_in_passwords():
    wanted = (chars("AB"), chars("01"), chars("xy"))
    tree = Repeat(ANY_CHAR, 3, 5)
    for allowed in wanted:
        tree = Both(tree, Chain((ANYTHING, allowed, ANYTHING)))
    machine = automaton(tree)
    plain = automaton(expression_of(machine))
    for text in map("".join, itertools.product("A0x", repeat=4)):
        assert accepts(machine, text) == accepts(plain, text) == (set(text) == set("A0x"))


def test_thousands_of_words_make_one_small_automaton():
    words = [f"{number:04}-{number % 7}" for number in range(5000)]
    machine = automaton(Choice(tuple(map(Text, words))))
    assert len(machine.moves) < 100
    assert all(accepts(machine, word) for word in words)
    assert not any(accepts(machine, f"{number:04}-{(number + 1) % 7}") for number in range(5000))


def test_a_long_text_takes_a_state_for_each_character():
    machine = automaton(Text("ab" * 4000))
    assert len(machine.moves) == 8001
    assert accepts(machine, "ab" * 4000)
    assert not accepts(machine, "ab" * 3999 + "a")


@pytest.mark.parametrize(("most", "states"), [(1000, 1001), (None, 2)])
def test_a_counted_repeat_takes_a_state_for_each_position(most, states):
    assert len(automaton(Repeat(chars("ab"), 1, most)).moves) == states


def test_nested_counts_do_not_multiply_where_they_leave_no_gap():
    tree = Repeat(Repeat(Repeat(Text("a"), 1, 10), 1, 10), 1, 10)
    machine = automaton(tree)
    assert len(machine.moves) == 1001
    assert [accepts(machine, "a" * count) for count in (0, 1, 1000, 1001)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("item", "least", "most"),
    [(r"a{2,3}", 2, 3), (r"a{3,4}", 0, 3), (r"a{2,2}", 1, 4), (r"(a{2,})", 0, 2), (r"a{5,7}", 2, 3)],
)
def test_a_repeat_of_a_counted_repeat_keeps_its_gaps(item, least, most):
    low, high = (int(part) if part else None for part in re.findall(r"\{(\d+),(\d*)\}", item)[0])
    machine = automaton(Repeat(Repeat(Text("a"), low, high), least, most))
    pattern = re.compile(f"(?:{item}){{{least},{most}}}")
    for count in range(30):
        assert accepts(machine, "a" * count) == bool(pattern.fullmatch("a" * count)), count


def test_lengths_decide_an_intersection_without_going_through_it():
    assert not intersects(Repeat(chars("ab"), 0, 10**6), Repeat(ANY_CHAR, 10**6 + 1))
    assert intersects(Chain((Text("x"), Repeat(chars("ab"), 0, 10**6))), Repeat(ANY_CHAR, 1, 10**9))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Repeat(Text("ab"), 1, 20_001), "20000 states"),
        (Chain((Repeat(chars("ab")), Text("a"), Repeat(chars("ab"), 30, 30))), "too (large|complex)"),
        (Repeat(Choice((Text("aab"), Repeat(Text("aaaaab"), 3, 5))), 5000, 9000), "too (large|complex)"),
        (Both(RuleCall("x"), Text("a")), "rule x"),
    ],
)
def test_what_is_too_large_or_not_regular_is_refused(tree, message):
    with pytest.raises(GrammarError, match=message):
        automaton(tree)


def test_trees_nested_too_deep_are_refused():
    tree = Text("a")
    for _ in range(30_000):
        tree = Chain((tree, Text("b")))
    with pytest.raises(GrammarError, match="nested too deep"):
        is_empty(tree)


def test_a_tree_that_shares_its_parts_is_gone_through_once():
    tree = Choice((Text("a"), Text("bc")))
    for _ in range(10):
        tree = Repeat(Chain((tree, tree)), 0, 1)
    for _ in range(60):
        tree = Choice((tree, tree))
    assert accepts(automaton(tree), "a" * 1024)
    assert not accepts(automaton(tree), "a" * 1025)


def test_an_expression_that_would_be_too_large_is_refused():
    machine = automaton(Both(Repeat(Text("ab"), 0, 40), Not(Repeat(Text("abab"), 3, 3))))
    with pytest.raises(GrammarError, match="more than 3 parts"):
        expression_of(machine, max_nodes=3)
