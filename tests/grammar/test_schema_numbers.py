"""Sets of JSON numbers against arithmetic: each text that is accepted, read as a decimal and as a double."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from decimal import Decimal
from fractions import Fraction

import jsonschema_rs
import pytest
import samples
from samples import some

from tureen.grammar import regular
from tureen.grammar.expression import NOTHING, GrammarError, Terminal
from tureen.grammar.schema.numbers import NumberSet

CANONICAL = re.compile(r"(?!-0(\.0*)?([eE].*)?$)-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
INTEGERS = [str(one) for one in range(-1200, 1201)]
WHOLE = {text: Fraction(text) for text in INTEGERS}
STEPS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 20, 25, 30, 60, 100, 125, 1000]
DECIMAL_STEPS = ["0.01", "0.05", "0.1", "0.2", "0.25", "0.3", "0.5", "0.7", "1.2", "1.5", "2.5"]


def accepted(numbers, texts):
    expression = numbers.encoded()
    assert isinstance(expression, Terminal) or expression == NOTHING
    machine = regular.automaton(expression)
    return {text for text in texts if regular.accepts(machine, text)}


def described(schema):
    """The set that a schema's number keywords describe; numbers as the schema's reader gives them."""
    schema = json.loads(json.dumps(schema) if isinstance(schema, dict) else schema, parse_float=Decimal)
    found = NumberSet.between(
        schema.get("minimum"),
        schema.get("maximum"),
        above=schema.get("exclusiveMinimum"),
        below=schema.get("exclusiveMaximum"),
    )
    if schema.get("type") == "integer":
        found = found.intersect(NumberSet.integers())
    if "multipleOf" in schema:
        found = found.intersect(NumberSet.multiples_of(schema["multipleOf"]))
    return found


def fits(schema, value):
    """Whether a Fraction is valid; the schema's numbers are exact."""
    return (
        ("minimum" not in schema or value >= schema["minimum"])
        and ("maximum" not in schema or value <= schema["maximum"])
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
        and (schema.get("type") != "integer" or value.denominator == 1)
    )


@functools.cache
def exact(schema):
    """The schema with Fractions for numbers."""
    pairs = json.loads(schema, parse_float=Fraction, parse_int=Fraction).items()
    return dict(pairs)


def random_bounds(rng, number):
    bounds = {}
    if rng.random() < 0.8:
        bounds[rng.choice(["minimum", "exclusiveMinimum"])] = number()
    if rng.random() < 0.8:
        bounds[rng.choice(["maximum", "exclusiveMaximum"])] = number()
    return bounds


def as_text(schema):
    """JSON; values that are strings but "type" are numbers."""
    members = (f'"{key}": {json.dumps(value) if key == "type" else value}' for key, value in schema.items())
    return "{" + ", ".join(members) + "}"


@pytest.mark.sampled
def test_integers_in_ranges_are_those_that_arithmetic_finds():
    rng = random.Random(1)
    for _ in range(samples.either(80, 20)):
        size = rng.choice([12, 150, 1300])
        schema = {"type": "integer", **random_bounds(rng, lambda size=size: rng.randint(-size, size))}
        wanted = {text for text, value in WHOLE.items() if fits(schema, value)}
        assert accepted(described(schema), INTEGERS) == wanted, schema


@pytest.mark.sampled
@pytest.mark.parametrize("step", some(STEPS, 10))
def test_multiples_of_integers_are_those_that_arithmetic_finds(step):
    rng = random.Random(step)
    for bounds in ({}, random_bounds(rng, lambda: rng.randint(-1500, 1500)), {"minimum": -7, "maximum": 5000 * step}):
        schema = {"type": "integer", "multipleOf": step, **bounds}
        wanted = {text for text, value in WHOLE.items() if fits(schema, value)}
        assert accepted(described(schema), INTEGERS) == wanted, schema


GRID = [
    text
    for number in range(-350, 351)
    for text in {f"{number / 100:.2f}", f"{number / 100:.4f}", f"{number / 100:.2f}".rstrip("0").rstrip(".")}
]


def canonical(texts):
    return {text for text in texts if CANONICAL.fullmatch(text)}


@pytest.mark.sampled
def test_decimals_in_ranges_are_those_that_arithmetic_finds():
    rng = random.Random(2)
    texts = canonical(GRID)
    for _ in range(samples.either(60, 20)):
        places = rng.choice([0, 1, 2, 3])
        schema = as_text(random_bounds(rng, lambda places=places: round(Decimal(rng.uniform(-4, 4)), places)))
        wanted = {text for text in texts if fits(exact(schema), Fraction(text))}
        if len({Fraction(text) for text in wanted}) > 1:
            assert accepted(described(schema), GRID) == wanted, schema


@pytest.mark.parametrize("step", DECIMAL_STEPS)
def test_multiples_of_decimals_are_those_that_arithmetic_finds(step):
    rng = random.Random(step)
    short = {text for text in canonical(GRID) if len(text.partition(".")[2]) <= len(step.partition(".")[2])}
    for bounds in ({}, random_bounds(rng, lambda: round(Decimal(rng.uniform(-4, 4)), 2)), {"minimum": "-3.25"}):
        schema = as_text({"multipleOf": step, **bounds})
        wanted = {text for text in short if fits(exact(schema), Fraction(text))}
        found = accepted(described(schema), GRID)
        assert found & short == wanted, schema
        assert all(fits(exact(schema), Fraction(text)) for text in found), schema


@pytest.mark.parametrize(
    "schema",
    [
        "{}", '{"type": "integer"}', '{"minimum": 0}', '{"exclusiveMinimum": 0}', '{"exclusiveMaximum": 0}',
        '{"maximum": 0}', '{"minimum": -1, "maximum": 1}', '{"exclusiveMinimum": -0.9, "exclusiveMaximum": 0.1}',
        '{"multipleOf": 0.5}', '{"multipleOf": 3}', '{"minimum": 9.9, "exclusiveMaximum": 110}', '{"multipleOf": 0.03}',
        '{"minimum": -0.0, "maximum": 1.0}',
    ],
)  # fmt: skip
def test_every_short_text_that_is_accepted_is_json_in_canonical_form_and_fits(schema):
    texts = ["".join(chars) for size in range(6) for chars in itertools.product("-.019e", repeat=size)]
    found = accepted(described(schema), texts)
    for text in found:
        assert CANONICAL.fullmatch(text), text
        assert fits(exact(schema), Fraction(json.loads(text, parse_float=Decimal))), text
    plain = {text for text in texts if CANONICAL.fullmatch(text) and "e" not in text and len(text) < 5}
    missing = {text for text in plain if fits(exact(schema), Fraction(text))} - found
    if exact(schema).get("multipleOf") or "integer" in schema:
        missing = {text for text in missing if "." not in text}
    assert not missing


BOUNDS = [
    "0", "-0.0", "1", "5.0", "0.1", "0.30000000000000004", "3.141592653589793", "1e-10", "1e-300", "5e-324",
    "0.9999999", "99999.99999", "123456789.125", "999999999999.9", "1234567890123456.8", "9007199254740991",
    "9007199254740993", "9007199254740992.0", "18446744073709551615", "1e16", "1e21", "1e23", "1e50",
    "100000000000000000000000", "1.7976931348623157e308",
]  # fmt: skip
KEYWORDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]


def near(bound):
    """Texts of and around a bound, with up to 24 digits after the point."""
    found = [bound]
    for places in range(25):
        middle = Fraction(bound) * 10**places
        for shift in (-3, -2, -1, 0, 1, 2, 3):
            digits = f"{abs(round(middle) + shift):0{places + 1}d}"
            text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
            found += [text, f"-{text}"]
    return [text for text in found if CANONICAL.fullmatch(text) and len(text) < 400]


def fits_as_double(schema, text):
    """As a reader of doubles sees it; a multiple of a decimal is one by the shortest decimal of the double."""
    value, schema = json.loads(text), json.loads(schema)
    step = schema.get("multipleOf")
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and (step is None or Fraction(repr(value)) % Fraction(repr(step)) == 0)
    )


@pytest.mark.parametrize("bound", [sign + bound for bound in BOUNDS for sign in ("", "-") if not bound.startswith("-")])
def test_texts_near_a_bound_never_cross_it_whoever_reads_them(bound):
    texts = near(bound.lstrip("-"))
    for keyword in KEYWORDS:
        schema = f'{{"{keyword}": {bound}}}'
        judge = jsonschema_rs.validator_for(json.loads(schema))
        for numbers in (described(schema), described(schema).intersect(NumberSet.integers())):
            found = accepted(numbers, texts)
            for text in found:
                assert fits(exact(schema), Fraction(text)), (schema, text)
                assert fits_as_double(schema, text), (schema, text)
                assert judge.is_valid(json.loads(text, parse_float=Decimal)), (schema, text)
                assert judge.is_valid(json.loads(text)), (schema, text)
            if abs(Fraction(bound)) < 10**40:
                inside = {
                    text for text in texts if fits(exact(schema), Fraction(text)) and fits_as_double(schema, text)
                }
                assert {text for text in inside if "." not in text and "e" not in text and len(text) < 20} <= found


def random_set(rng, depth):
    """A set, and the function that tells what is in it."""
    if depth and rng.random() < 0.75:
        first, in_first = random_set(rng, depth - 1)
        second, in_second = random_set(rng, depth - 1)
        how = rng.choice(["intersect", "union", "minus", "complement"])
        if how == "intersect":
            return first.intersect(second), lambda value: in_first(value) and in_second(value)
        if how == "union":
            return first.union(second), lambda value: in_first(value) or in_second(value)
        if how == "minus":
            return first.minus(second), lambda value: in_first(value) and not in_second(value)
        return first.complement(), lambda value: not in_first(value)
    kind = rng.randrange(4)
    if kind == 0:
        return NumberSet.integers(), lambda value: value.denominator == 1
    if kind == 1:
        values = [Decimal(rng.randint(-300, 300)) / 100 for _ in range(rng.randint(1, 3))]
        return NumberSet.only(values), lambda value: value in [Fraction(one) for one in values]
    if kind == 2:
        step = rng.choice(["1", "2", "3", "0.5", "0.1", "0.25"])
        number = json.loads(step, parse_float=Decimal)
        return NumberSet.multiples_of(number), lambda value: value % Fraction(step) == 0
    schema = as_text(random_bounds(rng, lambda: Decimal(rng.randint(-300, 300)) / 100))
    return described(schema), lambda value: fits(exact(schema), value)


@pytest.mark.sampled
def test_combinations_hold_what_logic_says():
    rng = random.Random(3)
    values = {Fraction(number, 20) for number in range(-80, 81)}
    for _ in range(samples.either(120, 30)):
        numbers, is_inside = random_set(rng, 3)
        wanted = {value for value in values if is_inside(value)}
        assert {value for value in values if numbers.contains(Decimal(value.numerator) / value.denominator)} == wanted
        spelled = {text: Fraction(text) for text in map(str_of, values)}
        assert {spelled[text] for text in accepted(numbers, spelled)} == wanted
        assert not wanted or not numbers.is_empty()


@pytest.mark.parametrize(
    "schema",
    [
        '{"minimum": 1e50}', '{"maximum": -1e50}', '{"exclusiveMinimum": 0, "maximum": 1e-20}',
        '{"minimum": 1e-30, "maximum": 2e-30}', '{"minimum": -1e-40, "exclusiveMaximum": 0}',
        '{"minimum": 1e60, "multipleOf": 3}', '{"minimum": 5e49, "maximum": 1e80, "type": "integer"}',
    ],
)  # fmt: skip
def test_a_set_of_numbers_that_have_no_text_is_not_empty_and_the_others_are_not_in_it(schema):
    signs, digits, exponents = ("", "-"), ("1", "1.5", "9.99", "10"), range(-99, 100)
    texts = [f"{sign}{one}e{exponent}" for sign in signs for one in digits for exponent in exponents]
    numbers = described(schema)
    assert not numbers.is_empty()
    assert accepted(numbers, texts) == set()
    assert all(not fits(exact(schema), Fraction(text)) for text in accepted(numbers.complement(), texts))
    whole = numbers.union(NumberSet.only([1])).complement().complement()
    assert all(fits(exact(schema), Fraction(text)) for text in accepted(whole, texts) if Fraction(text) != 1)


def str_of(value):
    return json.dumps(value.numerator if value.denominator == 1 else float(value))


@pytest.mark.sampled
def test_a_set_is_empty_exactly_where_no_text_is_accepted():
    rng = random.Random(4)
    outcomes = set()
    for _ in range(samples.either(300, 80)):
        low = Decimal(rng.randint(-40, 40)) / 10
        numbers = NumberSet.between(low, low + Decimal(rng.randint(0, 12)) / 10).intersect(
            rng.choice([NumberSet.integers(), NumberSet.multiples_of(Decimal("0.7")), NumberSet.multiples_of(3)])
        )
        for step in rng.sample([1, 2, Decimal("1.4"), Decimal("0.3")], 2):
            numbers = numbers.minus(NumberSet.multiples_of(step)) if rng.random() < 0.4 else numbers
        numbers = numbers.minus(NumberSet.only([rng.randint(-4, 4)]))
        assert numbers.is_empty() == regular.is_empty(numbers.encoded())
        outcomes.add(numbers.is_empty())
    assert outcomes == {True, False}


def test_single_numbers_are_written_as_json_dumps_writes_them():
    values = [3, -7, 0, 10**30, Decimal("0.5"), Decimal("1.50"), Decimal("2.0"), Decimal("1e-7"), Decimal("-0.0")]
    texts = {"3", "-7", "0", "1" + "0" * 30, "0.5", "1.5", "2", "1e-07"}
    numbers = NumberSet.only(values)
    assert accepted(numbers, texts | {"0.50", "1.50", "2.0", "3.0", "-0", "1e-7", "0.0000001"}) == texts
    assert numbers.values == tuple(dict.fromkeys(values))


def test_the_values_of_a_set_are_known_where_they_are_few():
    few = NumberSet.between(0, 1).intersect(NumberSet.multiples_of(Decimal("0.25")))
    assert few.values == (0, Decimal("0.25"), Decimal("0.5"), Decimal("0.75"), 1)
    assert accepted(few, GRID) == {
        text
        for text in GRID
        if 0 <= Fraction(text) <= 1 and Fraction(text) % Fraction(1, 4) == 0 and len(text) < 6 and text[0] != "-"
    }
    assert NumberSet.between(-2, 3).intersect(NumberSet.integers()).values == (-2, -1, 0, 1, 2, 3)
    assert NumberSet.between(0, 1).values is None
    assert NumberSet.integers().values is None
    assert NumberSet.nothing().values == ()


@pytest.mark.parametrize("step", ["9", "11", "64", "0.011", "1e-13", "7.7"])
def test_a_step_that_takes_too_large_an_expression_is_refused_by_name(step):
    numbers = NumberSet.multiples_of(json.loads(step, parse_float=Decimal))
    with pytest.raises(GrammarError, match="multipleOf"):
        numbers.encoded()


@pytest.mark.parametrize("step", [9, 11, 64, 3600, 86400])
def test_any_step_is_possible_between_bounds_that_leave_few_multiples(step):
    numbers = NumberSet.multiples_of(step).intersect(NumberSet.between(-step, 100 * step))
    texts = [str(number) for number in range(-2 * step, 102 * step, max(1, step // 16))]
    assert accepted(numbers, texts) == {
        text for text in texts if int(text) % step == 0 and -step <= int(text) <= 100 * step
    }


@pytest.mark.parametrize("text", ["1e400", "0.12345678901234567890", "9" * 401])
def test_numbers_that_readers_do_not_agree_on_are_refused(text):
    with pytest.raises(GrammarError, match="the schema has a number that is too large"):
        NumberSet.between(json.loads(text, parse_float=Decimal))


def test_numbers_are_not_sought_for_ever():
    numbers = NumberSet.between(0, 30_000).intersect(NumberSet.integers())
    with pytest.raises(GrammarError, match="too large"):
        numbers.minus(NumberSet.only(range(30_001)))


def test_a_combination_of_too_many_ranges_is_refused():
    numbers = NumberSet.nothing()
    for number in range(256):
        numbers = numbers.union(NumberSet.between(2 * number, 2 * number + 1))
    with pytest.raises(GrammarError, match="too many ranges"):
        numbers.union(NumberSet.between(-2, -1))
