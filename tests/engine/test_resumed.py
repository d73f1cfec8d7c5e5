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
from resumed_pieces import pieces
from samples import either
from world import World, going_on, make_request, random_requests

from tureen.contract.runner import Capacity
from tureen.contract.types import FinishReason, LogprobSpec, OutputDelta, Usage
from tureen.engine.engine import Engine
from tureen.engine.finish import aborted
from tureen.engine.queue import OUTPUT_COST, Schedule
from tureen.engine.replays import TOKENS_AT_ONCE
from tureen.errors import RequestFailed, Unavailable
from tureen.grammar.base import GrammarSpec
from tureen.runner.fake import FakeRunner
from tureen.serving.streams import merge

LETTERS = ("a", "b", "é", "日", "😀", "<", " ", "\n", "stop")
BYTES = [*"".join(LETTERS).encode(), *b"aabb  ", 0xC3, EOS, BOS]
"""What is drawn where nothing is forced: characters of several bytes come whole now and then, and broken."""
COMPILER = InlineCompiler()


def make_engine(*, token_budget=64, token_ids=BYTES):
    choose = (lambda token, *_: token_ids[token % len(token_ids)]) if token_ids else None
    runner = FakeRunner(Capacity(200, 4, 8, VOCAB_SIZE, 800), choose=choose)
    return Engine(
        runner,
        make_byte_tokenizer(),
        eos_token_ids=(EOS,),
        token_budget=token_budget,
        compiler=COMPILER,
    )


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


@pytest.mark.sampled
@settings(deadline=None, max_examples=either(120, 8))
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


@pytest.mark.sampled
@settings(deadline=None, max_examples=either(60, 8))
@given(
    params=st.fixed_dictionaries(TEXTS),
    grammar=st.sampled_from([None, None, None, *GRAMMARS]),
    logprobs=scores,
    seed=st.integers(0, 2**32),
    token_budget=st.sampled_from([2, 5, 64]),
    explain=st.booleans(),
)
def test_text_goes_on_where_it_was_cut(params, grammar, logprobs, seed, token_budget, explain):
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    request = make_request("r", (65, 66, 67), max_new_tokens=24, seed=seed, logprobs=logprobs, **params)
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex", explain=explain)
    whole = merge(check_every_cut(lambda: make_engine(token_budget=token_budget), request))
    num_tokens = len(whole.token_ids)
    first = len(request.token_ids)
    assert [why.token_id for why in whole.explanations] == list(whole.token_ids if explain else ())
    assert [why.position - first for why in whole.explanations] == list(range(num_tokens if explain else 0))


@pytest.mark.parametrize("grammar", GRAMMARS[:4])
@pytest.mark.parametrize("logprobs", [None, LogprobSpec()])
def test_a_grammar_is_followed_from_the_middle(grammar, logprobs):
    request = make_request("r", (65, 66), max_new_tokens=90, seed=4, logprobs=logprobs, stop=("tinct", "right"))
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex")
    check_every_cut(lambda: make_engine(token_budget=7, token_ids=None), request)


def _num_chars(token_ids):
    """Whole characters that these bytes are, were they running text."""
    data = bytes(token for token in token_ids if token < 256)
    return len(codecs.getincrementaldecoder("utf-8")("replace").decode(data))


@pytest.mark.sampled
@settings(deadline=None, max_examples=either(60, 8))
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


# ---- what cannot go on


def refusal(engine, request):
    """Why it ends at once."""
    [delta] = pieces(engine, request)
    assert delta == OutputDelta(request.id, finish=delta.finish)
    return delta.finish


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"resumed": (65,) * 5}, "it has 5 tokens, at most 4 are asked for"),
        ({"resumed": (65, VOCAB_SIZE)}, "it has token 258, the model has tokens 0 to 257"),
        ({"resumed": (-1,)}, "it has token -1"),
        ({"resumed": (65,), "resumed_states": -1}, "negative"),
    ],
)
def test_what_no_output_of_the_request_can_be_is_refused(changes, why):
    engine = make_engine()
    with pytest.raises(RequestFailed, match=why) as caught:
        engine.add(msgspec.structs.replace(make_request(), **changes))
    assert caught.value.code == "not_resumable"
    assert not engine.has_work


@pytest.mark.parametrize(
    ("resumed", "params"),
    [((65, EOS, 66), {}), (tuple(b"abc"), {"stop": ("b",)}), ((65, 9, 9), {"stop_token_ids": (9,)})],
)
def test_an_output_that_goes_on_behind_its_end_is_an_error(resumed, params):
    request = msgspec.structs.replace(make_request(max_new_tokens=9, **params), resumed=resumed)
    finish = refusal(make_engine(), request)
    assert (finish.type, finish.status, finish.code) == ("error", 500, "not_resumable")
    assert "it ends after 2 of 3 tokens" in finish.message


@pytest.mark.parametrize("resumed", [b"abx", b"xb", b"abc, and the ecd", b"abc, and then axbcd"])
def test_a_grammar_refuses_what_it_does_not_allow(resumed):
    request = make_request(max_new_tokens=40)
    grammar = GrammarSpec("regex", "[abc]{3}, and then [a-z]+")
    request = msgspec.structs.replace(request, grammar=grammar, grammar_field="regex", resumed=tuple(resumed))
    if b"ax" in resumed:
        assert merge(pieces(make_engine(), request)).finish.type in ("stop", "length")
    else:
        finish = refusal(make_engine(), request)
        assert (finish.type, finish.status) == ("error", 500)
        assert finish.code in ("not_resumable", "grammar_mismatch")


@pytest.mark.parametrize(
    ("resumed", "params", "finish"),
    [
        ((65, 66), {"max_new_tokens": 2, "stop": ("BC",)}, FinishReason(type="length", length=2)),
        ((65, EOS), {}, FinishReason(type="stop", matched=EOS)),
        ((65, 66, 67), {"stop": ("BC",)}, FinishReason(type="stop", matched="BC")),
    ],
)
def test_an_output_that_has_ended_already_ends_at_once(resumed, params, finish):
    engine = make_engine()
    request = msgspec.structs.replace(make_request(**params), resumed=resumed)
    [delta] = pieces(engine, request)
    assert (delta.token_ids, delta.finish, delta.usage) == ((), finish, Usage(3, len(resumed), 0))
    assert engine.stats().total_steps == 0


# ---- what the engine makes of it besides


def test_many_tokens_hold_up_nobody_else():
    """They are gone through between the steps of others, which go on meanwhile."""
    engine = make_engine()
    engine.add(make_request("runs", max_new_tokens=40, ignore_eos=True))
    resumed = tuple(range(65, 91)) * 20
    engine.add(msgspec.structs.replace(make_request(max_new_tokens=700, ignore_eos=True), resumed=resumed))
    num_turns = 0
    while len(engine.preparing.replays.waiting):
        engine.prepare()
        assert [delta.id for delta in engine.step()][:1] == ["runs"]
        num_turns += 1
    assert num_turns == -(-len(resumed) // TOKENS_AT_ONCE)


@pytest.mark.parametrize("grammar", [None, GrammarSpec("regex", "A+")])
@pytest.mark.parametrize("num_turns", [0, 1, 2])
def test_what_was_sent_is_not_sent_again_where_it_is_called_off(num_turns, grammar):
    engine = make_engine()
    request = make_request(max_new_tokens=700)
    engine.add(msgspec.structs.replace(request, resumed=(65,) * 600, grammar=grammar, grammar_field="regex"))
    for _ in range(num_turns):
        engine.prepare()
    engine.abort("r", "deadline")
    [delta] = engine.step()
    assert delta == OutputDelta("r", finish=aborted("deadline"))
    assert not engine.has_work
    assert not engine.is_preparing


def test_it_comes_before_new_requests_and_is_not_refused_where_these_are():
    engine = Engine(
        FakeRunner(Capacity(64, 4, 1, VOCAB_SIZE, 800)), make_byte_tokenizer(), eos_token_ids=(EOS,), max_queued=1
    )
    first, second, late = (
        make_request(name, max_new_tokens=2, ignore_eos=True) for name in ("first", "second", "late")
    )
    engine.add(first)
    engine.add(second)
    with pytest.raises(Unavailable):
        engine.add(late)
    engine.add(msgspec.structs.replace(late, resumed=(65,)))
    ended = []
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        ended += [delta.id for delta in engine.step() if delta.finish]
    assert ended == ["late", "first", "second"]


def test_no_client_pays_twice():
    """Neither for the prompt nor for what was sent."""
    world = World(schedule=Schedule("fair"))
    request = make_request("r", range(20), max_new_tokens=6, ignore_eos=True, client="ann")
    world.add(request)
    for _ in range(3):
        world.step()
    num_sent = len(world.answers["r"].token_ids)
    assert num_sent > 1
    other = world.replaced()
    other.drain()
    served = other.engine.scheduler.queue.order._served
    assert served == {(False, "ann"): OUTPUT_COST * (6 - num_sent)}
