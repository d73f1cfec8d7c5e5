"""Keyword arguments of literals, compared with what Python's own parser makes of them."""

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tureen.text.python_literals import keyword_arguments

REFUSED = (
    "1",
    "a",
    "a=",
    "a=b",
    "a=f()",
    "a=1 b=2",
    "a=1,, b=2",
    ",",
    "a=1+1",
    "a=--1",
    "a=1j",
    "a=b'x'",
    "a={1, 2}",
    "a={1: 2}",
    "a={'x'}",
    "a='x' 'y'",
    'a="""x"""',
    "a=f'{x}'",
    "a='x",
    "a='\\x1'",
    "a=[1",
    "a=]",
    "a=01",
    "a=1, a=2",
    "**[1]",
    "**{'a': 1}, a=2",
    "a=lambda: 1",
    "a=[x for x in y]",
    "a=x.y",
    "a=...",
    "a='x'.upper()",
    "a=" + "[" * 100 + "]" * 100,
    "a=" + "9" * 5000,
    "=1",
    "a==1",
)


def as_python_has_it(text):
    call = ast.parse(f"f({text})", mode="eval").body
    return {one.arg: ast.literal_eval(one.value) for one in call.keywords}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(
    arguments=st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), VALUES, max_size=4),
    space=st.sampled_from(["", " ", "\n", "\t "]),
    comma=st.booleans(),
)
def test_arguments_are_read_as_python_reads_them(arguments, space, comma):
    written = f",{space}".join(f"{space}{name}{space}={space}{value!r}" for name, value in arguments.items())
    text = written + "," * (comma and bool(arguments))
    assert json.dumps(keyword_arguments(text)) == json.dumps(arguments)


@pytest.mark.parametrize(
    "text",
    [
        r"""a='it\'s', b="say \"x\"\\" """,
        r"a='\n\t\\\x41\u00e9\N{BULLET}\101'",
        "a=-1, b=+2, c=1_000, d=.5, e=1., f=1e3",
        "a=(1, (2,), (), (3))",
        "a=[1, 2,], b={'x': 1,},",
        "a='\\\n'",
        "a=\"'\", b='\"'",
        "",
    ],
)
def test_every_way_to_write_a_literal_means_what_it_means_in_python(text):
    assert json.dumps(keyword_arguments(text)) == json.dumps(as_python_has_it(text))


def test_an_unknown_escape_is_taken_as_it_stands():
    assert keyword_arguments(r"a='\d+\.'") == {"a": "\\d+\\."}


def test_the_words_of_json_are_known_and_an_object_may_stand_for_all_arguments():
    assert keyword_arguments('**{"a": true, "b": null, "c": false}') == {"a": True, "b": None, "c": False}
    assert keyword_arguments("a=true, **{'b': None}") == {"a": True, "b": None}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20])
def test_what_is_no_literal_or_has_no_name_is_refused(text):
    with pytest.raises(ValueError):
        keyword_arguments(text)
