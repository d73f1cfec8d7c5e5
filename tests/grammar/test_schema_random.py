"""Random JSON schemas against an independent validator: the language has the valid values, and no others."""

from __future__ import annotations

import itertools
import json
import random

import jsonschema
import pytest
from matching import matches
from random_schemas import Walk, document, value
from samples import some
from schema_suite import texts

from tureen.grammar.expression import GrammarError
from tureen.grammar.schema.language import json_schema

REFUSED = ("no JSON value", "minProperties", "may be the same", "uniqueItems")
"""What these schemas may be refused for."""


def read(text):
    """The language, and why there is none."""
    try:
        return json_schema(text, leaves_out=False, strict=True), ""
    except GrammarError as error:
        return None, str(error)


SAME_LETTER = (1792, 3731, 3778)
"""Seeds of values with two keys that begin with one letter, of objects that must have so many."""


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [*some(range(200), 40), *SAME_LETTER])
def test_the_values_of_a_random_schema_are_the_valid_ones(seed):
    dice = random.Random(seed)
    schema = document(dice)
    validator = jsonschema.Draft202012Validator(schema)
    text = json.dumps(schema)
    values = [value(dice) for _ in range(10)]
    language, reason = read(text)
    if language is None:
        assert any(part in reason for part in REFUSED), text
        valid = [item for item in values if validator.is_valid(item)]
        if "no JSON value" in reason:
            assert not valid, text
        else:
            check_what_is_not_enforced(text, valid)
        return
    for item in values:
        written = itertools.islice(texts(item, text), 150)
        assert any(matches(language, one) for one in written) == validator.is_valid(item), (text, item)
    walk = Walk(language, dice)
    for _ in range(8):
        made = walk.text(language.start)
        # Python's $ also matches before a last line break; that of JSON Schema does not.
        assert "\\n" in made or validator.is_valid(json.loads(made)), (text, made)
    check_what_is_left_out(schema, text, language, dice)


def check_what_is_not_enforced(text, valid):
    """Without strict the language is larger, never smaller, and says why."""
    language = json_schema(text, leaves_out=False)
    assert language.unenforced, text
    for item in valid:
        assert any(matches(language, one) for one in itertools.islice(texts(item, text), 150)), (text, item)


def check_what_is_left_out(schema, text, whole, dice):
    """The server's language is a part of the whole one, and not empty."""
    language = json_schema(text)
    walk = Walk(language, dice)
    for _ in range(8):
        assert matches(whole, walk.text(language.start)), text
