"""An output that another engine goes on with, wherever it is cut, is that of a run that nobody disturbed."""

from __future__ import annotations

import codecs
import random

import msgspec
import pytest
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inline_compiler import InlineCompiler
from world import World, going_on, make_request, random_requests

from tureen.engine.engine import Engine
from tureen.grammar.base import GrammarSpec
from tureen.runner.base import Capacity
from tureen.runner.fake import FakeRunner
from tureen.serving.streams import merge
from tureen.types import LogprobSpec

LETTERS = ("a", "b", "é", "日", "😀", "<", " ", "\n", "stop")
BYTES = [*"".join(LETTERS).encode(), *b"aabb  ", 0xC3, EOS, BOS]
"""What is drawn where nothing is forced: characters of several bytes come whole now and then, and broken."""
COMPILERS = {name: InlineCompiler(name) for name in ("llguidance", "xgrammar", "outlines")}


def make_engine(backend="llguidance", *, token_budget=64, token_ids=BYTES):
    choose = (lambda token, *_: token_ids[token % len(token_ids)]) if token_ids else None
    runner = FakeRunner(Capacity(200, 4, 8, VOCAB_SIZE, 800), choose=choose)
    return Engine(
        runner,
        make_byte_tokenizer(),
        eos_token_ids=(EOS,),
        token_budget=token_budget,
        compiler=COMPILERS[backend],
    )


def pieces(engine, request, *mates):
    """The deltas of a request, beside others."""
    for one in (*mates, request):
        engine.add(one)
    found = []
    for _ in range(20_000):
        if not engine.has_work and not engine.is_preparing:
            return found
        engine.prepare()
        found += [delta for delta in engine.step() if delta.id == request.id]
    raise AssertionError("it does not end")


def check_every_cut(make, request, *mates):
    """At each border between two deltas. Returns what an undisturbed run sends."""
    whole = pieces(make(), request)
    for cut in range(1, len(whole)):
        sent = whole[:cut]
        rest = pieces(make(), going_on(request, merge(sent)), *mates)
        assert merge([*sent, *rest]) == merge(whole), cut
    return whole


# ---- every kind of request, as the fake model of world.py answers it


def _make_world(seed):
    chance = random.Random(seed)
    return World(
        num_pages=40,
        page_size=chance.choice([1, 2, 5]),
        token_budget=chance.choice([1, 3, 16, 64]),
        prefix_cache=chance.random() < 0.8,
    )


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32))
def test_any_request_goes_on_from_every_delta(seed):
    chance = random.Random(seed)
    context_len = _make_world(seed).context_len
    [request] = random_requests(chance, context_len, 1)
    mates = random_requests(chance, context_len, chance.choice([0, 0, 3]))
    mates = [msgspec.structs.replace(mate, id=f"mate {mate.id}") for mate in mates]
    check_every_cut(lambda: _make_world(seed).engine, request, *mates)


# ---- text: stops that begin before the cut, characters that it divides

TEXTS = {
    "stop": st.lists(st.text("ab é日\n", min_size=1, max_size=4), max_size=3),
    "stop_regex": st.lists(st.sampled_from(["a+b", "(?<=é)a", "b.*?b", "[ab]{3}", "日|é b", r"a\Z", "st"]), max_size=2),
    "min_new_tokens": st.integers(0, 20),
    "no_stop_trim": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "temperature": st.sampled_from([0.0, 1.0]),
}
GRAMMARS = [
    GrammarSpec("regex", "(ab|é日){3,9}(stop| stop right here)?"),
    GrammarSpec("regex", "the same words again and again(, é)*"),
    GrammarSpec("choice", '["abstinence", "absolute", "a日本語", "😀😀é"]'),
    GrammarSpec("ebnf", 'root ::= ("a" | "b日" | " stop")+ "<end of it all>"'),
    GrammarSpec("regex", "(aé){2,5}", after="b"),
]
scores = st.none() | st.builds(LogprobSpec, prompt_start=st.integers(-1, 3), top=st.integers(0, 2))


@settings(deadline=None, max_examples=150)
@given(
    params=st.fixed_dictionaries(TEXTS),
    grammar=st.sampled_from([None, None, None, *GRAMMARS]),
    logprobs=scores,
    seed=st.integers(0, 2**32),
    token_budget=st.sampled_from([2, 5, 64]),
)
def test_text_goes_on_where_it_was_cut(params, grammar, logprobs, seed, token_budget):
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    request = make_request("r", (65, 66, 67), max_new_tokens=24, seed=seed, logprobs=logprobs, **params)
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex")
    check_every_cut(lambda: make_engine(token_budget=token_budget), request)


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("grammar", GRAMMARS[:4])
@pytest.mark.parametrize("logprobs", [None, LogprobSpec()])
def test_every_backend_follows_a_grammar_from_the_middle(backend, grammar, logprobs):
    request = make_request("r", (65, 66), max_new_tokens=90, seed=4, logprobs=logprobs, stop=("tinct", "right"))
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex")
    check_every_cut(lambda: make_engine(backend, token_budget=7, token_ids=None), request)


def _num_chars(token_ids):
    """Whole characters that these bytes are, were they running text."""
    data = bytes(token for token in token_ids if token < 256)
    return len(codecs.getincrementaldecoder("utf-8")("replace").decode(data))


@settings(deadline=None, max_examples=60)
@given(
    params=st.fixed_dictionaries(TEXTS),
    grammar=st.sampled_from([None, *GRAMMARS]),
    logprobs=scores,
    seed=st.integers(0),
)
@example(params={"stop": ["日"]}, grammar=GRAMMARS[1], logprobs=None, seed=0)
def test_within_a_delta_no_token_and_no_text_is_lost(params, grammar, logprobs, seed):
    """Only a border tells which text was sent; elsewhere it is what could have come with those tokens."""
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    params |= {"skip_special_tokens": True}
    request = make_request("r", (65, 66, 67), max_new_tokens=16, seed=seed % 2**60, logprobs=logprobs, **params)
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex")
    whole = merge(pieces(make_engine(), request))
    for count in range(1, len(whole.token_ids)):
        sent = msgspec.structs.replace(whole, token_ids=whole.token_ids[:count])
        rest = merge(pieces(make_engine(), going_on(request, sent)))
        assert sent.token_ids + rest.token_ids == whole.token_ids
        assert rest.output_logprobs == whole.output_logprobs[count:][: len(rest.token_ids)]
        assert (rest.usage, rest.finish) == (whole.usage, whole.finish)
        assert whole.text.endswith(rest.text)
        assert len(whole.text) - len(rest.text) <= _num_chars(sent.token_ids)
