"""Sets of objects and of strings: what makes them quick changes nothing of what they are."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter

import pytest

from tureen.grammar import GrammarError
from tureen.grammar.derivatives import Derivatives, Matcher
from tureen.grammar.schema import objects
from tureen.grammar.schema.algebra import Algebra
from tureen.grammar.schema.document import Document
from tureen.grammar.schema.formats import FORMATS, format_strings
from tureen.grammar.schema.language import json_schema
from tureen.grammar.schema.shapes import ObjectShape, Property, PropertySet, ValueShape
from tureen.grammar.schema.strings import StringSet
from tureen.grammar.schema.unenforced import UnenforcedKeywords


@pytest.fixture
def algebra():
    return Algebra(UnenforcedKeywords(Document(True), strict=True))


def shapes_of(algebra, rng, count):
    words = [algebra.fixed(ValueShape(strings=StringSet.only([word]))) for word in "abc"]
    nodes = [algebra.anything, algebra.nothing, *words, algebra.both(*words[:2]), algebra.all_of(words)]
    for _ in range(count):
        names = rng.sample("uvw", rng.randint(0, 3))
        free = (PropertySet(algebra.keys.every, rng.choice((algebra.anything, algebra.nothing, words[0]))),)
        needed = (PropertySet(algebra.keys.every, rng.choice(words)),) if rng.random() < 0.2 else ()
        named = {name: Property(rng.random() < 0.5, rng.choice(nodes)) for name in names}
        yield ObjectShape(named, free, rng.choice((0, 0, 1)), rng.choice((None, 4)), needed)


def has_no_values(algebra, shape):
    return any(shape.named[key].node is algebra.nothing for key in shape.required)


@pytest.mark.parametrize("seed", range(20))
def test_traits_tell_no_shapes_apart_of_which_one_covers_the_other(algebra, seed):
    shapes = [shape for shape in shapes_of(algebra, random.Random(seed), 60) if not has_no_values(algebra, shape)]
    num_covered = 0
    for shape in shapes:
        for other in shapes:
            if objects.covers(algebra, shape, other):
                num_covered += 1
                its, others = objects.traits(algebra, shape), objects.traits(algebra, other)
                more = set(its.more) if others.leaves_others else set()
                assert more.union(its.few) <= {*others.few, *others.more}
    assert num_covered > len(shapes)


@pytest.mark.parametrize("seed", range(5))
def test_whether_two_shapes_meet_is_told_as_by_what_they_have_in_common(algebra, seed):
    shapes = list(shapes_of(algebra, random.Random(seed), 60))
    meeting = Counter()
    for shape in shapes:
        for other in shapes:
            meets = objects.may_meet(algebra, shape, other)
            assert meets == bool(objects.meet(algebra, shape, other))
            meeting[meets] += 1
    assert min(meeting[True], meeting[False]) > 50


@pytest.mark.parametrize("seed", range(20))
def test_in_a_union_each_shape_is_covered_and_none_by_another(algebra, seed):
    shapes = [shape for shape in shapes_of(algebra, random.Random(seed), 40) if not has_no_values(algebra, shape)]
    kept = algebra.objects.join(shapes)
    assert all(any(objects.covers(algebra, other, shape) for other in kept) for shape in shapes)
    assert not any(objects.covers(algebra, one, two) for one in kept for two in kept if one is not two)


def test_each_branch_of_one_of_is_complemented_once(monkeypatch):
    complemented = []
    complement = objects.complement
    monkeypatch.setattr(
        objects, "complement", lambda algebra, shape: complemented.append(shape) or complement(algebra, shape)
    )
    branches = [{"properties": {f"k{index}": {"type": "string"}}} for index in range(4)]
    json_schema(json.dumps({"type": "object", "oneOf": branches}))
    assert sorted(next(iter(shape.named)) for shape in complemented) == ["k0", "k1", "k2", "k3"]


def is_in(algebra, shape, value):
    nodes = {key: objects.node_of(shape, key) for key in value}
    free = value.keys() - shape.named.keys()
    return (
        shape.required <= value.keys()
        and shape.least <= len(value) <= (len(value) if shape.most is None else shape.most)
        and all(algebra.shape(nodes[key]).strings.contains(text) for key, text in value.items())
        and all(any(algebra.shape(node).strings.contains(value[key]) for key in free) for _, node in shape.needed)
    )


@pytest.mark.parametrize("seed", range(15))
def test_what_is_left_of_a_union_is_in_no_shape_that_is_taken_from_it(algebra, seed):
    rng = random.Random(seed)
    first, second = (algebra.objects.join(shapes_of(algebra, rng, 4)) for _ in range(2))
    left, outside = algebra.objects.minus(first, second), algebra.objects.complement(second)
    for texts in itertools.product((None, *"abc"), repeat=4):
        value = {key: text for key, text in zip("uvwx", texts, strict=True) if text is not None}
        in_first, in_second, in_left, in_outside = (
            any(is_in(algebra, shape, value) for shape in union) for union in (first, second, left, outside)
        )
        assert in_left == (in_first and not in_second), value
        assert in_outside != in_second, value


def test_a_shape_that_has_nothing_in_common_with_what_is_taken_stays_as_it_is(algebra):
    one, other = (algebra.fixed(ValueShape(strings=StringSet.only([word]))) for word in "ab")
    free = (PropertySet(algebra.keys.every, algebra.anything),)
    first, second = (ObjectShape({"kind": Property(True, node)}, free) for node in (one, other))
    assert algebra.objects.minus((first,), (second,)) == (first,)


@pytest.mark.parametrize(
    ("pattern", "keys", "taken"),
    [("^x-", ("a", "b"), ""), ("^x-", ("x-a", "b"), "x-a"), ("^[ab]$", ("a", "b"), "ab"), ("^(a|b)$", ("c",), "")],
)
def test_of_the_named_keys_only_those_are_taken_from_a_pattern_that_it_is_found_in(algebra, pattern, keys, taken):
    names = algebra.keys.pattern(pattern)
    rest = algebra.keys.without(names, keys)
    assert (rest is names) == (not taken)
    for text in ("a", "b", "x-", "x-a", "x-b", "c"):
        assert rest.contains(text) == (bool(re.search(pattern, text)) and text not in keys)
    assert (algebra.keys.encoded_without(names, keys) is None) == (taken == "ab")


@pytest.mark.parametrize("pattern", ["x-", "^a+b$", "[^a]b", r"^\w{2,3}$", "^(?!ab)", "(a|b)*c$", r"\d|é", "^$", ""])
def test_a_pattern_is_found_where_re_finds_it(pattern):
    strings = StringSet.pattern(pattern)
    rng = random.Random(pattern)
    texts = ["", *("".join(rng.choices("abcx-1é🙂", k=rng.randint(1, 6))) for _ in range(300))]
    ascii_only = re.compile(pattern, re.ASCII)
    assert strings.among(texts) == tuple(text for text in texts if ascii_only.search(text))
    assert any(map(strings.contains, texts))


def test_keys_are_compared_with_a_pattern_by_one_automaton_however_many_there_are(monkeypatch):
    num_made = []
    make = Derivatives.__init__
    monkeypatch.setattr(Derivatives, "__init__", lambda *args: num_made.append(1) or make(*args))

    def made_for(num_keys):
        num_made.clear()
        named = {f"key{index}": {"type": "integer"} for index in range(num_keys)}
        json_schema(
            json.dumps({"properties": named, "patternProperties": {"^k.*-": True}, "additionalProperties": False})
        )
        return len(num_made)

    assert made_for(300) == made_for(3) > 0


def test_what_many_questions_took_is_not_counted_against_the_next(monkeypatch):
    strings = StringSet.pattern("(a|b)*a(a|b){9}$")
    rng = random.Random(1)
    texts = ["".join(rng.choices("ab", k=60)) for _ in range(12)]
    most = max(_work(strings, text) for text in texts)
    monkeypatch.setattr("tureen.grammar.terms.MAX_WORK", most + 1)
    assert [strings.contains(text) for text in texts] == [bool(re.search("a[ab]{9}$", text)) for text in texts]
    monkeypatch.setattr("tureen.grammar.terms.MAX_WORK", 10)
    with pytest.raises(GrammarError):
        strings.contains("ab" * 60 + "b")


def _work(strings, text):
    matcher = Matcher(strings.expression)
    matcher.matches(text)
    return matcher._machine.terms._work


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_written_as_one_terminal_for_all_schemas(name):
    assert format_strings(name).encoded() is format_strings(name).encoded()
    schema = json.dumps({"items": {"type": "string", "format": name}, "type": "array"})
    written = [str(json_schema(schema).rules) for _ in range(2)]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "pattern", ["^[ab]*$", "^a[ab]+$", "^x[ab]{2,5}y$", "^(ab|ba)$", "^a?b$", "^(ab)*$", "[ab]", "^[a-c]+[ab]*$"]
)
@pytest.mark.parametrize(("least", "most"), [(0, 3), (2, None), (3, 3), (1, 7), (5, 6), (0, 0)])
def test_strings_of_a_pattern_and_a_length_are_those_of_both(pattern, least, most):
    both = StringSet.of_length(least, most).intersect(StringSet.pattern(pattern))
    texts = [
        "".join(letters)
        for size in range(8)
        for letters in itertools.product("abxy"[: 4 if size < 5 else 2], repeat=size)
    ]
    fitting = [
        text
        for text in texts
        if re.search(pattern, text) and least <= len(text) <= (most or (8 if most is None else 0))
    ]
    assert list(both.among(texts)) == fitting
    assert both.is_empty() <= (not fitting)


@pytest.mark.parametrize("pattern", ["^[a-z0-9-]*$", "^arn:aws:[a-z]+:1$", "^[0-9a-f]{8}-[0-9a-f]{4}$", "^(on|off)$"])
def test_a_length_beside_a_pattern_takes_no_intersection_where_characters_can_be_counted(pattern):
    both = StringSet.of_length(1, 1024).intersect(StringSet.pattern(pattern))
    assert "Both" not in repr(both.expression)
