import itertools
import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import either
from work import count_lines

from tureen.contract.params import SamplingParams, check_params
from tureen.errors import InvalidRequest
from tureen.requests.planning import Names

MOST_LINES = 200_000

VOCAB = 1000
INT64_MAX = 2**63 - 1


def _parse(**fields):
    params = msgspec.convert(fields, SamplingParams)
    check_params(params, vocab_size=VOCAB)
    return params


# field: (values just inside the bounds, values just outside)
BOUNDS = {
    "max_new_tokens": ([0, 1, INT64_MAX, None], [-1, INT64_MAX + 1, 1.5, "5", True]),
    "min_new_tokens": ([0, 128], [-1, 129, INT64_MAX + 1, 1.0, None, False]),
    "stop": (
        [[], ["x"], ["x" * 1024], ["x"] * 1024, ["\n\0é🙂"]],
        [[""], ["x" * 1025], ["x"] * 1025, "x", [1], [None], None],
    ),
    "stop_token_ids": ([[], [0], [VOCAB - 1], [5] * 1024], [[-1], [VOCAB], [1] * 1025, [True], [1.0], ["1"], [2**70]]),
    "stop_regex": (
        [[], ["a+"], ["x" * 1024], ["a"] * 1024],
        [["("], ["a*"], [""], ["x" * 1025], ["a"] * 1025, ["(?P<a>"], ["x{99999999999999999999}"], "a"],
    ),
    "temperature": ([0, 0.0, 5e-324, 1, 1e308], [-1e-9, -0.5, math.nan, math.inf, -math.inf, 10**400, True, "1", None]),
    "top_p": ([1, 1.0, 1e-9, 5e-324], [0, 0.0, -0.1, 1.0000001, math.nan, math.inf, True]),
    "top_k": ([-1, 0, 1, INT64_MAX], [-2, INT64_MAX + 1, 1.0, 10**400, True]),
    "min_p": ([0, 1, 0.5, 5e-324], [-1e-9, 1.0000001, math.nan, math.inf, True]),
    "typical_p": ([1, 1.0, 0.5, 5e-324], [0, 0.0, -0.1, 1.0000001, math.nan, math.inf, True]),
    "frequency_penalty": ([-2, 2, 0.5], [-2.0001, 2.0001, math.nan, math.inf, -math.inf, True]),
    "presence_penalty": ([-2, 2, 0.5], [-2.0001, 2.0001, math.nan, math.inf, -math.inf, True]),
    "repetition_penalty": ([0, 2, 1.0, 5e-324], [-1e-9, 2.0001, math.nan, math.inf, True]),
    "repeat_last_n": ([-1, 0, 64, INT64_MAX], [-2, INT64_MAX + 1, 1.0, None, True]),
    "ignore_eos": ([True, False], [1, 0, "true", None]),
    "skip_special_tokens": ([True, False], [1, 0, "true", None]),
    "spaces_between_special_tokens": ([True, False], [1, 0, "true", None]),
    "no_stop_trim": ([True, False], [1, 0, "true", None]),
    "n": ([1, 4096], [0, 4097, -1, 1.0, True, 10**400]),
    "json_schema": (
        [None, "{}", {}, {"type": "object"}, "x" * (2 << 20), {"enum": ["y" * ((2 << 20) - len('{"enum":[""]}'))]}],
        ["", "x" * ((2 << 20) + 1), "é" * (1600 << 10), {"enum": ["y" * (2 << 20)]}, [], True, 1],
    ),
    "regex": ([None, "a+", "x" * (256 << 10)], ["", "x" * ((256 << 10) + 1), ["a"], {}, 1]),
    "ebnf": ([None, 'root ::= "a"'], ["", "x" * ((256 << 10) + 1), ["a"], {}, 1]),
    "structural_tag": ([None, "{}", {"type": "structural_tag"}], ["", "x" * ((2 << 20) + 1), [], True, 1]),
    "choice": ([None, ["a"], ["a", "b"]], [[], "a", [1], [None], {}, ["x" * (256 << 10)]]),
    "dtype": ([None, "int", "float", "bool", "str"], ["", "integer", 1, ["int"]]),
    "strict_schema": ([False], [True, 1, 0, "true", None]),
    "grammar_after": ([""], ["</think>", "x" * 257, None, 1, ["x"]]),
    "close_early": ([True, False], [1, 0, "true", None]),
    "logit_bias": (
        [{}, {0: 100}, {VOCAB - 1: -100.0}, {i % VOCAB: 0.5 for i in range(VOCAB)}],
        [
            {-1: 1.0},
            {VOCAB: 1.0},
            {5: 100.001},
            {5: -100.001},
            {5: math.nan},
            {5: math.inf},
            {5: True},
            dict.fromkeys(range(1025), 0.0),
            {10**400: 1.0},
            {"a": 1.0},
            [],
        ],
    ),
    "allowed_token_ids": (
        [None, [0], [VOCAB - 1, 5]],
        [[], [-1], [VOCAB], [1.5], [True], 5, "5", [0] * ((1 << 16) + 1)],
    ),
    "bad_words": (
        [[], ["a"], [" a "], ["ab", "cd"], ["a" * 32768], ["a"] * 1024],
        [[""], ["  "], ["a", "\n"], "a", 5, [5], [None], ["a"] * 1025, ["a" * 32769], ["a" * 20000] * 2],
    ),
    "repetition_detection": (
        [
            None,
            {},
            {"max_pattern_size": 0},
            {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0},
            {"max_pattern_size": 1, "min_count": 2},
            {"max_pattern_size": 1024, "min_pattern_size": 1, "min_count": 10},
        ],
        [
            {"max_pattern_size": 1},
            {"max_pattern_size": 1, "min_count": 1},
            {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2},
            {"min_pattern_size": 1},
            {"max_pattern_size": 1025, "min_count": 2},
            {"max_pattern_size": 1024, "min_count": 11},
            {"max_pattern_size": -1},
            {"most": 5},
            5,
            [],
        ],
    ),
    "custom_params": (
        [None, {}, [{}, None], {"token_id": 5, "nested": [1, {"a": None}]}, {"x": "y" * (16384 - len('{"x":""}'))}],
        [
            "x",
            1,
            True,
            [1],
            [{}] * 4097,
            [{"x": "y" * 16384}],
            {"x": "y" * (16385 - len('{"x":""}'))},
            {"x": "é" * 8192},
            {"x": [{"y": 2**64}]},
            [None, {"x": -(2**63) - 1}],
        ],
    ),
    "sampling_seed": ([None, 0, INT64_MAX, -(2**63)], [INT64_MAX + 1, -(2**63) - 1, 1.0, True, "1", 10**400]),
    "stream_interval": ([None, 1, INT64_MAX], [0, -1, INT64_MAX + 1, 1.0, True]),
}


def test_every_field_has_its_bounds_tested():
    assert list(BOUNDS) == [field.name for field in msgspec.structs.fields(SamplingParams)]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (inside, _) in BOUNDS.items() for value in inside], ids=repr
)
def test_values_inside_the_bounds_are_taken(name, value):
    expected = tuple(value) if isinstance(value, list) else value
    assert getattr(_parse(**{name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, outside) in BOUNDS.items() for value in outside], ids=str
)
def test_values_outside_the_bounds_are_refused_by_name(name, value):
    with pytest.raises((InvalidRequest, msgspec.ValidationError), match=name) as caught:
        _parse(**{name: value})
    if isinstance(caught.value, InvalidRequest):
        assert caught.value.field == name
        assert len(caught.value.message) < 250


def test_a_marker_goes_with_a_constraint():
    assert _parse(regex="a", grammar_after="x" * 256).grammar_after == "x" * 256
    with pytest.raises(msgspec.ValidationError, match="grammar_after"):
        _parse(regex="a", grammar_after="x" * 257)


CONSTRAINTS = {"json_schema": {}, "regex": "a", "ebnf": "a", "structural_tag": {}, "choice": ["a"], "dtype": "int"}


@pytest.mark.parametrize(("one", "other"), itertools.combinations(CONSTRAINTS, 2))
def test_two_constraints_are_refused_by_name(one, other):
    with pytest.raises(InvalidRequest, match=f"{other} cannot go with {one}") as caught:
        _parse(**{name: CONSTRAINTS[name] for name in (one, other)})
    assert caught.value.field == other


def test_the_path_of_a_message_is_the_callers():
    params = SamplingParams(min_new_tokens=2, max_new_tokens=1)
    with pytest.raises(InvalidRequest, match=r"^sampling_params\[3\]\.min_new_tokens must be") as caught:
        check_params(params, vocab_size=VOCAB, path=Names("sampling_params[3]").path)
    assert caught.value.field == "sampling_params[3].min_new_tokens"


@pytest.mark.parametrize(
    "patterns",
    [
        ["((a{1000}){1000}){1000}b"],
        ["a{1000000000}"],
        ["a{,99999999}b"],
        ["(?:" + "a" * 900 + "){500}"],
        ["a{700}"] * 64,
        ["(?r)ab"],
        ["(?x)a{1 000 000}"],
        ["(?i-x:a)"],
        ["(" * 500 + "a" + ")" * 500],
    ],
    ids=lambda patterns: patterns[0][:30],
)
def test_a_pattern_that_is_dear_to_compile_is_refused_at_once(patterns):
    def refuse():
        with pytest.raises(InvalidRequest, match="stop_regex"):
            _parse(stop_regex=patterns)

    assert count_lines(refuse) < MOST_LINES


def test_ordinary_patterns_with_counts_are_taken():
    patterns = (r"\d{3}-\d{3}-\d{4}", r"[A-Z]{1,50}\.", r"\w{1,20} \w{1,20}\n", r"\p{L}{2,}!", "(?i)end{0}e", "{}", "x")
    assert _parse(stop_regex=list(patterns)).stop_regex == patterns


def test_min_new_tokens_is_free_where_max_new_tokens_is_null():
    assert _parse(min_new_tokens=10**6, max_new_tokens=None).min_new_tokens == 10**6


def test_an_unknown_field_is_refused():
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        _parse(temprature=1.0)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_repetition_penalty_of_zero_or_one_is_off(penalty):
    assert not SamplingParams(repetition_penalty=penalty).has_repetition_penalty


VALID = st.builds(
    SamplingParams,
    max_new_tokens=st.none() | st.integers(0, INT64_MAX),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    temperature=st.floats(0, allow_nan=False, allow_infinity=False),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, INT64_MAX),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    sampling_seed=st.none() | st.integers(-(2**63), INT64_MAX),
    ignore_eos=st.booleans(),
)


@pytest.mark.sampled
@settings(max_examples=either(100, 25))
@given(params=VALID)
def test_parameters_survive_both_wires(params):
    check_params(params, vocab_size=VOCAB)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    if not any("\ud800" <= character <= "\udfff" for stop in params.stop for character in stop):
        assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_every_field_says_what_it_means():
    for field in msgspec.structs.fields(SamplingParams):
        described = [meta for meta in get_args(field.type) if isinstance(meta, msgspec.Meta) and meta.description]
        assert described, field.name
