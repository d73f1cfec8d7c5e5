"""What no grammar can enforce is enforced by a guard: judged by jsonschema, and by brute force over small languages."""

from __future__ import annotations

import itertools
import json
import random
import re
import tracemalloc
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest
import samples
from exact_masks import allowed, check_exact

from tureen.grammar import GrammarError, GrammarSpec, LanguageCompiler, Vocabulary, compile_grammar
from tureen.grammar.frontends import language_of
from tureen.grammar.guard.guarded import GuardedCompiled
from tureen.grammar.guard.multiples import can_be_multiple, shortest_rest
from tureen.grammar.schema.language import json_schema
from tureen.grammar.shortest_completion import way_out
from tureen.kernels.cpu import native

BYTES = tuple(bytes([byte]) for byte in range(256))
LONG = (
    b'"a"', b'"b"', b'", "', b'"]', b'"a", "a"', b'"a", "b"', b"1, 1", b", 1", b"12", b'"a": ', b'{"a": 1}, {"a": 1}',
    b'", "a', b"], [", b"0.7", b"1.4", b"true", b"e, ", b'": 1, "', b"[]", b"1]", b"}",
)  # fmt: skip
VOCABULARIES = {
    "bytes": Vocabulary(BYTES, (256,), 257),
    "long": Vocabulary((*BYTES, *LONG), (256 + len(LONG),), 257 + len(LONG)),
}
LIKELY = (*(bytes([byte]) for byte in b'ab",]}12 :07.t-'), *LONG)
MAX_TOKENS = 600


def strings(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string", "maxLength": 1}, "uniqueItems": True, **keywords}


def integers(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": 20, **keywords}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "strings": strings(minItems=3, maxItems=6),
    "escapes": strings(items={"enum": [*'\\"\n\x01', "é", "a", "b", "c", "d", "aa", "ab"]}, minItems=6, maxItems=9),
    "integers": {"type": "array", "items": integers(), "uniqueItems": True, "minItems": 4, "maxItems": 8},
    "decimals": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "uniqueItems": True,
                 "minItems": 2, "maxItems": 6},
    "objects": {"type": "array", "items": an_object(a=integers()), "uniqueItems": True, "minItems": 3, "maxItems": 5},
    "arrays": {"type": "array", "items": strings(maxItems=2), "uniqueItems": True, "minItems": 2, "maxItems": 4},
    "mixed": {"type": "array", "uniqueItems": True, "minItems": 1, "maxItems": 6,
              "items": {"type": ["string", "integer", "boolean", "null"], "maxLength": 1, "minimum": 0, "maximum": 9}},
    "nullable": an_object(tags={"anyOf": [strings(maxItems=4), {"type": "null"}]}),
    "several": {"allOf": [{"type": "array", "maxItems": 5}, {"items": {"type": "string", "maxLength": 1}},
                          {"uniqueItems": True}]},
    "recursive": {"$defs": {"node": an_object(t=strings(maxItems=3), n={"$ref": "#/$defs/leaf"}),
                            "leaf": {"type": ["object", "null"], "properties": {"t": strings(maxItems=3)},
                                     "required": ["t"]}}, "$ref": "#/$defs/node"},
    "tuple": {"type": "array", "prefixItems": [strings(maxItems=3), {"type": "boolean"}], "items": strings(maxItems=2),
              "minItems": 2, "maxItems": 4},
    "members": {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": strings(maxItems=3),
                "minProperties": 1, "maxProperties": 2},
    "enough for most": strings(items={"enum": list("abcdefghijkl")}, minItems=10),
    "all of ten": strings(items={"enum": [f"a{letter}" for letter in "abcdefghij"]}, minItems=10),
    "multiples of 97": {"type": "array", "items": {"type": "integer", "multipleOf": 97}, "minItems": 2, "maxItems": 3},
    "multiples of 0.37": {"type": "array", "items": {"type": "number", "multipleOf": 0.37}, "minItems": 2,
                          "maxItems": 3},
    "multiples with bounds": {"type": "number", "multipleOf": 0.0013, "minimum": -500, "maximum": 90000},
    "integers of decimals": {"type": "integer", "multipleOf": 1.7},
    "keys": {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"const": 1},
             "minProperties": 30, "maxProperties": 32},
}  # fmt: skip


def spec(schema: Any, after: str = "") -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), after)


def compiled(schema: Any, vocabulary: Vocabulary, after: str = "") -> Any:
    backend = LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require())
    return compile_grammar(spec(schema, after), backend)


def written(grammar: Any, vocabulary: Vocabulary, dice: random.Random) -> str:
    """A text that a model with random wishes writes."""
    text = b""
    [end] = vocabulary.eos_token_ids
    for _ in range(MAX_TOKENS):
        tokens = allowed(grammar, vocabulary)
        assert tokens, f"nothing can follow {text!r}"
        if end in tokens and (tokens == [end] or dice.random() < 0.3):
            return text.decode()
        likely = [token for token in tokens if token != end and vocabulary.tokens[token] in LIKELY]
        token = dice.choice(likely or [token for token in tokens if token != end])
        assert grammar.accept(token)
        text += vocabulary.tokens[token]
        for forced in grammar.forced() if dice.random() < 0.5 else ():
            assert grammar.accept(forced), (text, vocabulary.tokens[forced])
            text += vocabulary.tokens[forced]
        if grammar.is_done:
            return text.decode()
    raise AssertionError(f"it does not come to an end: {text!r}")


def is_valid(schema: Any, text: str) -> bool:
    exact = json.loads(json.dumps(schema), parse_float=Fraction)  # floats would make multiples wrong
    return jsonschema.Draft202012Validator(exact).is_valid(json.loads(text, parse_float=Fraction))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_guard_leaves_nothing_unenforced(name):
    language = language_of(spec(SCHEMAS[name]))
    assert language.guard is not None
    assert language.unenforced == ()
    assert json_schema(json.dumps(SCHEMAS[name])).unenforced != ()


@pytest.mark.sampled
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_model_wishes_the_value_is_valid_and_there_is_always_a_way_on(name, size):
    vocabulary = VOCABULARIES[size]
    grammar = compiled(SCHEMAS[name], vocabulary)
    assert isinstance(grammar, GuardedCompiled)
    for seed in range(samples.either(12, 2)):
        text = written(grammar.start(), vocabulary, random.Random(seed))
        assert is_valid(SCHEMAS[name], text), text


MERGED = (
    b'{"', b'"day"', b'day": "', b'": "', b'": ', b'Mon"', b'Tue"', b'Mon", "', b'Tue", "', b'", "', b'slot": "',
    b'"slot"', b'am"', b'pm"', b'am"}', b'pm"}', b'"}, {"', b'}, {"', b'"}', b", ", b'{"day": "', b"o", b"Tu", b"lot",
)  # fmt: skip
"""Tokens that write the same text in many ways, as tokenizers of models have them."""
TURNS = {
    "type": "array", "uniqueItems": True, "minItems": 3,
    "items": {
        "type": "object", "required": ["day", "slot"], "additionalProperties": False,
        "properties": {"day": {"enum": ["Mon", "Tue"]}, "slot": {"enum": ["am", "pm"]}},
    },
}  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_a_text_that_tokens_can_write_in_many_ways_is_looked_at_once_and_no_dead_end_is_entered(seed):
    vocabulary = Vocabulary((*BYTES, *MERGED), (256 + len(MERGED),), 257 + len(MERGED))
    grammar, dice, text = compiled(TURNS, vocabulary).start(), random.Random(seed), b""
    [end] = vocabulary.eos_token_ids
    while end not in (tokens := allowed(grammar, vocabulary)):
        assert tokens, f"nothing can follow {text!r}"
        token = dice.choice([token for token in tokens if len(vocabulary.tokens[token]) > 1] or tokens)
        assert grammar.accept(token)
        text += vocabulary.tokens[token]
    assert is_valid(TURNS, text.decode())


EQUAL_WRITTEN_OTHERWISE = {
    "numbers": {"type": "array", "items": {"type": "number"}, "uniqueItems": True, "minItems": 2, "maxItems": 4},
    "anything": {"type": "array", "uniqueItems": True, "minItems": 2, "maxItems": 4},
    "lists of a number": {"type": "array", "uniqueItems": True, "minItems": 2, "maxItems": 4,
                          "items": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 1}},
    "members": {"type": "array", "items": an_object(a={"type": "number"}), "uniqueItems": True, "minItems": 2,
                "maxItems": 4},
    "letters": strings(minItems=2, maxItems=4),
}  # fmt: skip
PREFERRED = {
    "zero, then zeros behind an exponent": (b"[0, 0e+0", b"[[0], [0e+0", b'[{"a": 0}, {"a": 0e+0'),
    "one, then zeros behind an exponent": (b"[1, 1e+0", b"[[1], [1e+0", b'[{"a": 1}, {"a": 1e+0'),
    "one, then zeros behind a point": (b"[1, 1.0", b"[[1], [1.0", b'[{"a": 1}, {"a": 1.0'),
    "a hundred, then an exponent": (b"[100, 1e2", b"[[100], [1e02", b'[{"a": 100}, {"a": 1e2'),
    "nothing less than zero": (b"[0, -0.0", b"[[0], [-0", b'[{"a": 0}, {"a": -0.0'),
    "a letter, then its number": (b'["a", "\\u0061', b'["\\u0061", "a'),
}


@pytest.mark.parametrize("wish", PREFERRED)
@pytest.mark.parametrize("name", EQUAL_WRITTEN_OTHERWISE)
def test_what_is_equal_but_written_otherwise_leads_into_no_dead_end(name, wish):
    schema, vocabulary = EQUAL_WRITTEN_OTHERWISE[name], VOCABULARIES["bytes"]
    [end] = vocabulary.eos_token_ids
    for wanted in PREFERRED[wish]:
        grammar, text = compiled(schema, vocabulary).start(), b""
        for place in range(MAX_TOKENS):
            tokens = allowed(grammar, vocabulary)
            assert tokens, f"nothing can follow {text!r}"
            if end in tokens:
                break
            wishes = wanted[place : place + 1] or b'"]},0'
            token = next((byte for byte in wishes if byte in tokens), tokens[0])
            assert grammar.accept(token)
            text += vocabulary.tokens[token]
        assert is_valid(schema, text.decode()), text


LETTERS = "abcdefghi"
SMALL = {
    "letters": (strings(items={"enum": list(LETTERS)}, maxItems=3), [f'"{one}"' for one in LETTERS]),
    "beginnings": (
        strings(items={"enum": ["a", "aa", "aaa", "ab", "aba", "b", "ba", "bb", "bbb"]}, minItems=1, maxItems=3),
        [f'"{one}"' for one in ("a", "aa", "aaa", "ab", "aba", "b", "ba", "bb", "bbb")],
    ),
    "numbers": (
        {"type": "array", "items": {"enum": [1, 12, 123, 2, 21, 3, 31, 311, 4]}, "uniqueItems": True, "maxItems": 3},
        [str(one) for one in (1, 12, 123, 2, 21, 3, 31, 311, 4)],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("name", SMALL)
def test_a_token_is_allowed_exactly_where_a_valid_text_goes_on_with_it(name, size):
    schema, items = SMALL[name]
    vocabulary = VOCABULARIES[size]
    least = schema.get("minItems", 0)
    texts = [
        f"[{', '.join(chosen)}]".encode()
        for count in range(least, schema["maxItems"] + 1)
        for chosen in itertools.permutations(items, count)
    ]
    grammar, dice = compiled(schema, vocabulary), random.Random(name)
    check_exact(grammar, vocabulary, texts, dice, times=samples.either(6, 2))


@pytest.mark.parametrize("name", ["objects", "keys", "multiples of 0.37", "escapes"])
def test_going_back_leads_to_the_same_masks(name):
    vocabulary, dice = VOCABULARIES["long"], random.Random(name)
    grammar = compiled(SCHEMAS[name], vocabulary)
    place, path, masks = grammar.start(), [], []
    for _ in range(120):
        tokens = [token for token in allowed(place, vocabulary) if token not in vocabulary.eos_token_ids]
        masks.append(tokens)
        if not tokens or dice.random() < 0.3:
            count = dice.randint(0, len(path))
            place.rollback(count)
            del path[len(path) - count :], masks[len(masks) - count - 1 :]
            assert [t for t in allowed(place, vocabulary) if t not in vocabulary.eos_token_ids] == tokens or count
            continue
        refused = next((token for token in range(len(vocabulary.tokens)) if token not in tokens), None)
        assert refused is None or not place.accept(refused)
        path.append(dice.choice(tokens))
        assert place.accept(path[-1])
        fresh = grammar.start()
        assert all(map(fresh.accept, path))
        assert allowed(fresh, vocabulary) == allowed(place, vocabulary)


def test_the_value_may_come_after_a_marker():
    vocabulary = VOCABULARIES["bytes"]
    place = compiled(strings(minItems=2, maxItems=2), vocabulary, after="]:").start()
    for byte in b'["a", "a"] is wrong]:["a", "':
        assert place.accept(byte), chr(byte)
    assert place.accept(ord("b"))
    place.rollback(1)
    assert place.accept(ord("a")) is False or ord('"') not in allowed(place, vocabulary)


@pytest.mark.parametrize("schema", [True, an_object(a=integers()), strings(items={"enum": ["a", "b"]})])
def test_where_a_grammar_is_enough_there_is_no_guard(schema):
    assert not isinstance(compiled(schema, VOCABULARIES["bytes"]), GuardedCompiled)


UNSURE = {
    "another array without the same items": {"type": "array", "not": strings()},
    "numbers of several kinds": {
        "anyOf": [{"type": "integer", "multipleOf": 97}, {"type": "number", "multipleOf": 89.5}]
    },
}


@pytest.mark.parametrize("name", UNSURE)
def test_what_a_guard_cannot_do_is_left_to_the_list(name):
    assert json_schema(json.dumps(UNSURE[name]), guards=True).unenforced != ()
    with pytest.raises(GrammarError):
        json_schema(json.dumps(UNSURE[name]), guards=True, strict=True)


@pytest.mark.parametrize("bounds", [(None, None), ("0", "1000"), ("-77/10", "123/10"), ("50", None)])
@pytest.mark.parametrize("step", [(37, 2), (97, 0), (17, 1), (5, 1)])
def test_a_number_can_be_gone_on_with_exactly_where_a_multiple_begins_so(step, bounds):
    low, high = (None if bound is None else Fraction(bound) for bound in bounds)
    unit = 10 ** step[1]
    texts = set()
    for number in range(-3000, 3000):
        value = Fraction(number * step[0], unit)
        if (low is None or value >= low) and (high is None or value <= high):
            whole, rest = divmod(abs(number * step[0]), unit)
            sign = "-" if number < 0 else ""
            texts |= {f"{sign}{whole}.{rest:0{step[1]}}" if step[1] else f"{sign}{whole}"}
    beginnings = {text[:size] for text in texts for size in range(1, len(text) + 1)}
    for text in sorted(beginnings):
        assert can_be_multiple(text.encode(), step, bounds), text
    if all(bounds):
        for text in ("".join(digits) for size in (1, 2, 3) for digits in itertools.product("0123456789", repeat=size)):
            starts = any(one.startswith(text) for one in texts)
            if text == "0" or not text.startswith("0"):
                assert can_be_multiple(text.encode(), step, bounds) == starts, text


EQUAL = [
    ("1", "1.0"), ("[1, 2]", "[1.0, 2]"), ('{"a": 1, "b": 2}', '{"b": 2.0, "a": 1}'), ("10", "1e1"), ("0.0", "0"),
    ("120e-1", "12"), ("0e7", "0"), ("[1e0]", "[1]"), ("1.50", "15e-1"),
]  # fmt: skip
DIFFERENT = [
    ("1", "true"), ("0", "false"), ("null", '"null"'), ("[1, 2]", "[2, 1]"), ("[]", "{}"), ("1", "-1"), ("1e1", "1"),
    ('"1"', "1"), ('{"a": 1}', '{"b": 1}'), ('["a", "b"]', '["a,b"]'), ("[[]]", "[]"),
]  # fmt: skip


@pytest.mark.parametrize("are_equal", [True, False])
def test_values_are_compared_as_json_schema_does(are_equal):
    grammar, alone = (compiled({"type": "array", "uniqueItems": some}, VOCABULARIES["bytes"]) for some in (True, False))
    for pair in EQUAL if are_equal else DIFFERENT:
        for one, other in (pair, pair[::-1]):
            text = f"[{one}, {other}]"
            assert jsonschema.Draft202012Validator({"uniqueItems": True}).is_valid(json.loads(text)) is not are_equal
            assert all(map(alone.start().accept, text.encode())), text
            assert all(map(grammar.start().accept, text.encode())) is not are_equal, text


def test_a_number_that_the_grammar_refuses_is_not_computed():
    # a guessed token need not be of the mask: 10 ** 9999999 would take 4 MiB, and two digits more all there is
    huge = b"1e9999999, "
    vocabulary = Vocabulary((*BYTES, huge), (257,), 258)
    grammar = compiled({"type": "array", "items": {"type": "number"}, "uniqueItems": True}, vocabulary).start()
    assert grammar.accept(ord("["))
    tracemalloc.start()
    try:
        assert not grammar.accept(256)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert all(map(grammar.accept, b"1e99]"))
    assert grammar.is_accepting


def test_what_looks_like_a_reference_in_a_value_leads_nowhere():
    # an example, an annotation with a reference, a property of that name: found in real schemas, where they broke it
    doubtful = {"examples": [{"$ref": "#/nowhere"}], "default": {"$ref": 7}, "properties": {"$ref": {"type": "string"}}}
    schema = an_object(tags=strings(maxItems=3), other={"anyOf": [doubtful, {"type": "object", "title": "b"}]})
    language = json_schema(json.dumps(schema), guards=True)
    assert language.unenforced == ()
    assert language.guard is not None


@pytest.mark.parametrize("bounds", [(None, None), ("-77/10", "1234/10"), ("50", None)])
@pytest.mark.parametrize("step", [(37, 2), (97, 0), (1001, 0), (17, 1)])
def test_the_shortest_rest_of_a_number_makes_it_a_multiple(step, bounds):
    low, high = (None if bound is None else Fraction(bound) for bound in bounds)

    def is_right(text: str) -> bool:
        value = Fraction(text)
        fits = (low is None or value >= low) and (high is None or value <= high) and not (value == 0 and "-" in text)
        return fits and value * 10 ** step[1] % step[0] == 0

    for text in ("1", "7", "0", "55", "-3", "-1", "12.3", "0.0", "100"):
        if len(text.partition(".")[2]) > step[1]:
            continue
        rest = shortest_rest(text.encode(), step, bounds).decode()
        rests = ("".join(chars) for size in range(4) for chars in itertools.product("0123456789.", repeat=size))
        right = [
            other
            for other in rests
            if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text + other)
            and len((text + other).partition(".")[2]) <= step[1]
            and is_right(text + other)
        ]
        assert not right or len(rest) == len(right[0])
        assert is_right(text + rest) or not (right or rest)


def test_an_item_that_differs_early_is_read_no_further():
    """Each token that might come next is judged so: what is long and unlike costs no more than what is short."""
    numbers = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "uniqueItems": True}
    grammar = compiled(numbers, VOCABULARIES["bytes"])

    def work(count: int) -> int:
        place = grammar.start()
        text = b"[[10, 11], [" + b", ".join(b"%d" % (1000 * count + number) for number in range(count))
        assert all(map(place.accept, text))
        before = place.num_parts_read
        allowed(place, VOCABULARIES["bytes"])
        return place.num_parts_read - before

    assert 0 < work(200) == work(2)


OF_SHORT_OUTPUTS = (
    b'"', b",", b" ", b":", b"[", b"]", b"{", b"}", b"a", b"b", b"0", b"1", b"2", b"null", b'", "', b'": ', b'{"',
    b'["', b', "', b'""', b"1, ", b'null, "', b"n", b"u", b"l",
)  # fmt: skip


def shortest(grammar, ends, most):
    """The least number of tokens to the end, by trying all tokens."""

    def can_end(left):
        if grammar.is_accepting or grammar.cost > left:
            return grammar.is_accepting
        mask = np.zeros_like(ends)
        grammar.fill_mask(mask)
        for token_id in np.flatnonzero(np.unpackbits((mask & ~ends).view(np.uint8), bitorder="little")).tolist():
            assert grammar.accept(token_id)
            is_found = can_end(left - 1)
            grammar.rollback(1)
            if is_found:
                return True
        return False

    return next(left for left in range(grammar.cost, most) if can_end(left))


def test_the_shortest_output_of_a_guarded_schema_is_as_short_as_that_of_all_outputs():
    size = len(OF_SHORT_OUTPUTS)
    compiler = LanguageCompiler(
        Vocabulary((*OF_SHORT_OUTPUTS, b""), (size,), size + 1), lambda text: [], native.require()
    )
    text = {"type": "string"}
    schemas = [
        {"type": "object", "minProperties": 3, "additionalProperties": item}
        for item in ({"enum": ["a", "b", 1, None]}, text, text | {"maxLength": 2}, {"type": "null"})
    ]
    schemas += [
        {"type": "array", "items": item, "uniqueItems": True, "minItems": 4}
        for item in (text | {"pattern": "^[ab]+$"}, {"type": "integer"}, {"enum": ["a", "b", "ab", None]})
    ]
    for schema in schemas:
        compiled = compile_grammar(GrammarSpec("json_schema", json.dumps(schema)), compiler)
        found = way_out(compiled.start(), compiled.ends, 40)
        assert len(found) == shortest(compiled.start(), compiled.ends, 40), schema
