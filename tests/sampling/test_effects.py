"""Every sampling parameter does something: here, or in the part of the package that this table names."""

import re
from pathlib import Path

import msgspec
import pytest
from arithmetics import make_rows, make_sampler
from sampling_reference import make_logits, make_state

import tureen
from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.errors import InvalidRequest
from tureen.grammar.base import GrammarSpec
from tureen.requests.drafts import constrained

pytestmark = pytest.mark.usefixtures("each_arithmetic")

VOCAB = 200
STRONG = {"repetition_penalty": 0.1, "presence_penalty": -2.0}

# parameter: a value that must change what the sampler draws
CHANGES_TOKENS = {
    "min_new_tokens": 50,
    "temperature": 0.05,
    "top_p": 0.05,
    "top_k": 2,
    "min_p": 0.9,
    "typical_p": 0.2,
    "frequency_penalty": -2.0,
    "presence_penalty": -2.0,
    "repetition_penalty": 0.1,
    "repeat_last_n": 3,
    "logit_bias": {7: 20.0},
    "allowed_token_ids": (7, 9),
}

# parameter: folders with a module that acts on it
ACTED_ON_IN = {
    "max_new_tokens": ("engine",),
    "stop": ("text",),
    "stop_token_ids": ("engine",),
    "stop_regex": ("text",),
    "ignore_eos": ("engine",),
    "skip_special_tokens": ("text",),
    "spaces_between_special_tokens": ("text",),
    "no_stop_trim": ("engine", "text"),
    "n": ("requests",),
    "bad_words": ("requests", "sampling"),
    "repetition_detection": ("contract",),
    "custom_params": ("requests",),
    "dtype": ("requests",),
    "strict_schema": ("requests",),
    "grammar_after": ("requests",),
    "close_early": ("engine",),
    "sampling_seed": ("requests",),
    "stream_interval": ("requests",),
}


# parameter: a value, and the grammar that the engine gets for it
BECOMES_GRAMMAR = {
    "json_schema": ({"type": "null"}, GrammarSpec("json_schema", '{"type":"null"}')),
    "regex": ("a+", GrammarSpec("regex", "a+")),
    "ebnf": ('root ::= "a"', GrammarSpec("ebnf", 'root ::= "a"')),
    "structural_tag": ('{"type": "structural_tag"}', GrammarSpec("structural_tag", '{"type": "structural_tag"}')),
    "choice": (("é", "b"), GrammarSpec("choice", '["é","b"]')),
}


def _drawn(**params):
    """Forty tokens of one sequence."""
    state = make_state(seed=4, prompt=(1, 2), ends=range(100), **params)
    sampler = make_sampler(1, VOCAB)
    sampler.set_slot(state)
    logits = make_logits(0, VOCAB, scale=0.5, rows=40)
    return [sampler.sample(make_rows(row[None]), [0], [2 + step])[0].token_id for step, row in enumerate(logits)]


def test_every_parameter_has_an_effect_that_is_tested():
    names = [field.name for field in msgspec.structs.fields(SamplingParams)]
    assert sorted([*CHANGES_TOKENS, *ACTED_ON_IN, *BECOMES_GRAMMAR]) == sorted(names)


@pytest.mark.parametrize("name", BECOMES_GRAMMAR)
def test_the_parameter_constrains_the_output(name):
    value, spec = BECOMES_GRAMMAR[name]
    for strict in (False, True):
        params = SamplingParams(**{name: value}, grammar_after="</think>", strict_schema=strict)
        made = constrained(params, lambda field: f"p.{field}", Config())
        assert made.grammar == msgspec.structs.replace(spec, after="</think>", strict=strict)
    assert made.field == f"p.{name}"
    with pytest.raises(InvalidRequest, match="--grammar-backend none"):
        constrained(params, str, Config(grammar_backend="none"))


@pytest.mark.parametrize(
    ("dtype", "fits", "stops"),
    [
        ("int", ["0", "-12", "+7 \n"], (" ", "\n")),
        ("float", ["1.5", ".5", "-3"], (" ", "\n")),
        ("bool", ["True", "False"], ()),
        ("str", ['"a b 1"', '""'], ()),
    ],
)
def test_a_dtype_is_a_pattern_and_its_stops(dtype, fits, stops):
    made = constrained(SamplingParams(dtype=dtype, stop=("x",)), str, Config())
    assert all(re.fullmatch(made.grammar.text, text) for text in fits)
    assert not re.fullmatch(made.grammar.text, "x")
    assert made.params.stop == ("x", *stops)


@pytest.mark.parametrize("name", CHANGES_TOKENS)
def test_the_parameter_changes_the_tokens_drawn(name):
    others = STRONG if name == "repeat_last_n" else {}
    assert _drawn(**others, **{name: CHANGES_TOKENS[name]}) != _drawn(**others)


@pytest.mark.parametrize(("name", "folder"), [(name, folder) for name in ACTED_ON_IN for folder in ACTED_ON_IN[name]])
def test_the_parameter_is_acted_on_where_the_table_says(name, folder):
    sources = [path.read_text(encoding="utf-8") for path in (Path(tureen.__file__).parent / folder).glob("*.py")]
    assert any(re.search(rf"\.{name}\b", source) for source in sources)
