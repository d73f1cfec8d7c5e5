"""Constrained outputs come to an end within their limit, whatever is drawn; else they are refused before they run."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import msgspec
import pytest
from constrained_outputs import FORMATS, PATTERNS, least_of, limited, make_engine, random_schema, run
from fake_engine import choose
from samples import either
from world import going_on, make_request

from tureen.engine.scheduler import Drafters
from tureen.grammar import GrammarSpec, LanguageCompiler
from tureen.serving.streams import merge


def check(schema, answer, most):
    text, token_ids, finish = answer
    assert finish.type == "stop", (schema, most, answer)
    assert len(token_ids) <= most
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.sampled
def test_random_numbers_under_random_schemas_and_random_limits_always_make_valid_json():
    dice = random.Random(17)
    cases = []
    for index in range(either(150, 40)):
        schema = random_schema(dice)
        text = json.dumps(schema)
        least = least_of("json_schema", text)
        most = least + dice.choice([0, 0, 1, 2, 5, 20, 60])
        request = limited(str(index), "json_schema", text, most, seed=index, temperature=dice.choice([0.0, 1.0]))
        cases.append((request, schema, most))
    answers = run(make_engine(num_pages=100), *(request for request, _, _ in cases))
    for request, schema, most in cases:
        check(schema, answers[request.id], most)
    assert sum(answer[2].closed_early for answer in answers.values()) > len(answers) // 3


OTHERS = [
    *[("regex", pattern) for pattern in PATTERNS],
    ("regex", "[a-z ]+[.]"),
    ("ebnf", 'root ::= "(" root ")" | [a-z ]* | root2\nroot2 ::= "[" (root ("," root)*)? "]"'),
    ("choice", '["yes", "no", "it depends on the weather"]'),
    ("json_schema", "$$ANY$$"),
    (
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}],
                    "at_least_one": True,
                    "stop_after_first": True,
                },
            }
        ),
    ),
]


def is_derived(text):
    """By the grammar above: parentheses around letters, or around brackets with such things in them."""
    while text != (text := re.sub(r"\([a-z []*\)|\[[a-z ,]*\]", lambda m: "x" * (len(m[0]) > 0), text)):
        pass
    return re.fullmatch("[a-z ]*", text) is not None


def judged(kind, text, answer):
    """Whether the answer is whole, by a judge that had no part in it."""
    if kind == "regex":
        return re.fullmatch(text, answer) is not None
    if kind == "choice":
        return answer in json.loads(text)
    if kind == "structural_tag":
        json.loads(re.fullmatch("(?s)[^<]*(?:<[^f].*)?<f>(.*)</f>", answer)[1])
        return True
    if kind == "json_schema":
        json.loads(answer)
        return True
    return is_derived(answer)


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "text"), OTHERS)
def test_whatever_the_constraint_says_an_answer_within_any_limit_is_whole_or_refused(kind, text):
    least = least_of(kind, text)
    for most in (least, least + 1, least + 3, least + 11, least + 40):
        requests = [limited(f"{most} {seed}", kind, text, most, seed=seed) for seed in range(either(6, 3))]
        for answer, token_ids, finish in run(make_engine(), *requests).values():
            assert (finish.type, len(token_ids) <= most) == ("stop", True)
            assert judged(kind, text, answer), (kind, text, most, answer)
    if least > 1:
        [answer] = run(make_engine(), limited("a", kind, text, least - 1)).values()
        assert f"send at least {least}" in answer[2].message


AFTER = "</think>"


def test_what_comes_before_the_marker_ends_in_time_too():
    requests = [limited(str(seed), "choice", '["yes", "no"]', 12 + seed, seed=seed) for seed in range(9)]
    requests = [msgspec.structs.replace(r, grammar=GrammarSpec("choice", r.grammar.text, AFTER)) for r in requests]
    for answer, _, finish in run(make_engine(), *requests).values():
        assert finish.type == "stop"
        assert answer.partition(AFTER)[2] in ("yes", "no"), answer


SENTENCES = (
    '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}'
)


def test_a_limit_that_was_not_sent_rises_to_what_the_shortest_answer_takes():
    least = least_of("json_schema", SENTENCES)
    [answer] = run(make_engine(), limited("a", "json_schema", SENTENCES, 3, field="")).values()
    assert (answer[2].type, len(answer[1])) == ("stop", least)
    assert json.loads(answer[0]).keys() == {"a", "b"}


def test_what_does_not_fit_the_context_is_refused():
    engine = make_engine(context_len=12)
    [answer] = run(engine, limited("a", "json_schema", SENTENCES, 3, field="")).values()
    assert (answer[2].type, answer[2].status, answer[2].code) == ("error", 400, "context_exceeded")


def test_it_can_be_turned_off_and_the_limit_cuts():
    request = limited("a", "json_schema", SENTENCES, 9, close_early=False)
    [answer] = run(make_engine(), request).values()
    assert (answer[2].type, answer[2].length, answer[2].closed_early) == ("length", 9, False)


def test_an_answer_that_ends_by_itself_is_not_closed_early():
    [answer] = run(make_engine(), limited("a", "choice", '["yes", "no"]', 40)).values()
    assert (answer[2].type, answer[2].closed_early) == ("stop", False)


def cut_and_resumed(request, make):
    """What each border between two deltas of an output leads to in another engine, with what had been sent."""
    engine = make()
    engine.add(request)
    deltas = []
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        deltas += engine.step()
    for cut in range(1, len(deltas)):
        sent = merge(deltas[:cut])
        rest = run(make(), going_on(request, sent))[request.id]
        yield sent.text + rest[0], (*sent.token_ids, *rest[1]), rest[2]
    whole = merge(deltas)
    yield whole.text, whole.token_ids, whole.finish


@pytest.mark.sampled
def test_an_output_that_goes_on_elsewhere_ends_as_it_would_have():
    dice = random.Random(3)
    num_early = 0
    for index in range(either(12, 6)):
        text = json.dumps(random_schema(dice))
        most = least_of("json_schema", text) + dice.choice([0, 3, 15, 30])
        for field in ("max_new_tokens", ""):
            request = limited("a", "json_schema", text, most, seed=index, field=field)
            ways = list(cut_and_resumed(request, make_engine))
            assert all(way == ways[-1] for way in ways), (text, most)
            num_early += ways[-1][2].closed_early
    assert num_early > either(5, 2)


def test_an_output_ends_the_same_alone_among_others_in_small_pieces_and_preempted():
    dice = random.Random(5)
    requests = []
    for index in range(20):
        text = json.dumps(random_schema(dice))
        most = least_of("json_schema", text) + dice.choice([0, 60, 100])
        requests.append(limited(str(index), "json_schema", text, most, seed=index))
    alone = {}
    for request in requests:
        alone |= run(make_engine(), request)
    assert run(make_engine(), *requests) == alone
    assert run(make_engine(token_budget=3), *requests) == alone
    squeezed = make_engine(num_pages=24)
    assert run(squeezed, *requests) == alone
    assert squeezed.stats().total_preemptions > 0


TWO_TEXTS = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "required": ["a", "b"],
    }
)


def guesser(tokens, *, wrong):
    def guess(sequence, count, num_rows):
        coming = tokens[sequence.num_output :][:count]
        return tuple((token + (wrong and at % 2)) % 256 for at, token in enumerate(coming))

    return guess


@pytest.mark.parametrize("wrong", [False, True])
def test_right_and_wrong_guesses_change_no_end(wrong):
    for most in range(least_of("json_schema", TWO_TEXTS), 60, 3):
        request = limited("a", "json_schema", TWO_TEXTS, most, seed=most)
        plain = run(make_engine(), request)
        engine = make_engine()
        engine.scheduler.drafters = Drafters(guesser(plain["a"][1], wrong=wrong))
        assert run(engine, request) == plain


def test_an_output_that_was_cut_because_no_end_of_it_is_known_says_so(monkeypatch):
    load = LanguageCompiler.load

    def without_ends(self, program):
        compiled = load(self, program)
        compiled.least = None
        return compiled

    monkeypatch.setattr(LanguageCompiler, "load", without_ends)
    engine = make_engine()
    cut = limited("cut", "regex", "a{40}", 8)
    open_ended = limited("off", "regex", "a{40}", 8, close_early=False)
    whole = limited("whole", "regex", "a{4}", 8)
    told = {}
    for request in (cut, open_ended, whole):
        engine.add(request)
    while engine.has_work or engine.is_preparing:
        engine.prepare()
        told |= {delta.id: (delta.finish.type, delta.unenforced) for delta in engine.step() if delta.finish}
    assert told["off"] == ("length", ())
    assert told["whole"] == ("stop", ())
    assert (told["cut"][0], [name.partition(":")[0] for name in told["cut"][1]]) == ("length", ["close_early"])


def tag(form):
    return json.dumps({"type": "structural_tag", "format": form})


INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GUARDED = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2}
CALL = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</f>"}
GUARDED_CALL = CALL | {"content": {"type": "json_schema", "json_schema": GUARDED}}
CALLS = {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}
ONE_CALL = CALLS | {"stop_after_first": True}
GUARDED_CALLS = CALLS | {"tags": [GUARDED_CALL]}
OLD_CALLS = json.dumps({"structures": [{"begin": "<f>", "schema": INTEGER, "end": "</f>"}], "triggers": ["<f"]})
ANY_TEXT = {"type": "any_text"}
NO_CALL = {"type": "regex", "pattern": "[^<]"}
TEXTS = {
    "the older form": OLD_CALLS,
    "triggered_tags": tag(CALLS),
    "one tag": tag(ONE_CALL),
    "a tag with a guard": tag(GUARDED_CALLS),
    "dispatch": tag({"type": "dispatch", "rules": [["<f>", {"type": "const_string", "value": "1</f>"}]]}),
    "any_text": tag(ANY_TEXT),
    "any_text without a word": tag(ANY_TEXT | {"excludes": ["rain"]}),
    "text that may be left out": tag({"type": "optional", "content": ANY_TEXT}),
    "a tag before it": tag({"type": "sequence", "elements": [{"type": "tag", **CALL, "begin": "<g>"}, CALLS]}),
    "a call or else text": tag(
        {"type": "or", "elements": [{"type": "tag", **CALL}, {"type": "sequence", "elements": [NO_CALL, ANY_TEXT]}]}
    ),
    "a tag without an end": tag({"type": "tag", "begin": "", "content": ANY_TEXT, "end": ""}),
}
PROSE = "Sunny. It is 20 °C 😀, and a <b>. No <tool> is needed!\nGo out."


def said(text, kind, language, most):
    """Ask for what the model says, under a constraint or, of no kind, without one."""
    prompt = tuple(f"say:{text}".encode())
    if not kind:
        return make_request("a", prompt, max_new_tokens=most)
    return msgspec.structs.replace(limited("a", kind, language, most), token_ids=prompt)


@pytest.mark.parametrize("name", TEXTS)
def test_free_text_beside_tags_is_cut_by_its_limit_as_if_it_had_no_tags(name):
    prose = '<g>{"a": 1}</f>' * (name == "a tag before it") + PROSE
    size = len(prose.encode())
    for most in (*range(len(prose) - len(PROSE) + 1, size + 3), 1000):
        requests = [said(prose, kind, TEXTS[name], most) for kind in ("", "structural_tag")]
        plain, answer = (run(make_engine(choose=choose), request)["a"] for request in requests)
        assert answer == plain
        assert (answer[2].type, len(answer[1])) == (("length", most) if most <= size else ("stop", size + 1))


CALLED = {"triggered_tags": '{"a": 123456}', "one tag": '{"a": 123456}', "the older form": '{"a": 123456}',
          "a tag with a guard": "[1, 2, 3, 4]"}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_a_call_in_free_text_is_whole_and_only_the_text_is_cut(name):
    schema = GUARDED if name == "a tag with a guard" else INTEGER
    text = f"Look: <f>{CALLED[name]}</f> Well."
    num_calls = 0
    for most in range(1, len(text) + 1):
        answer, token_ids, finish = run(make_engine(choose=choose), said(text, "structural_tag", TEXTS[name], most))[
            "a"
        ]
        called = re.fullmatch(r"(?s)((?:(?!<f).)*)(?:<f>(.*?)</f>(.*))?", answer)
        assert called, (most, answer)
        assert "<f" not in (called[3] or "")
        if called[2] is not None:
            jsonschema.validate(json.loads(called[2]), schema)
            num_calls += 1
        ends_with_call = name == "one tag" and called[2] is not None
        assert (finish.type, len(token_ids) <= most) == ("stop" if ends_with_call else "length", True)
        assert ends_with_call or len(token_ids) == most
    assert num_calls >= 5


ENDED = {
    "an end mark": {"type": "tag", "begin": "", "content": ANY_TEXT, "end": "END"},
    "something after it": {"type": "sequence", "elements": [ANY_TEXT, {"type": "const_string", "value": "END"}]},
    "something after tags": {"type": "sequence", "elements": [CALLS, {"type": "const_string", "value": "END"}]},
    "a bound": ANY_TEXT | {"max_chars": 60},
    "a tag that must be there": ONE_CALL | {"at_least_one": True},
}


@pytest.mark.parametrize("name", ENDED)
def test_free_text_that_has_an_end_comes_to_it_in_time(name):
    for most in range(least_of("structural_tag", tag(ENDED[name])), 40, 5):
        request = said(PROSE * 2, "structural_tag", tag(ENDED[name]), most)
        answer, token_ids, finish = run(make_engine(choose=choose), request)["a"]
        assert (finish.type, len(token_ids) <= most) == ("stop", True), answer
        assert name == "a bound" or answer.endswith(("END", "</f>"))


WHOLE = {
    "calls and no text": (tag({"type": "tags_with_separator", "tags": [CALL], "separator": ","}), True),
    "one call and no text": (
        tag({"type": "tags_with_separator", "tags": [CALL], "separator": ",", "stop_after_first": True}),
        False,
    ),
    "one call in free text": (tag(ONE_CALL), False),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("close_early", [True, False])
def test_an_output_that_its_last_token_completes_has_stopped(name, close_early):
    language, may_go_on = WHOLE[name]
    text = '<f>{"a": 12}</f>'
    request = said(text, "structural_tag", language, len(text))
    params = msgspec.structs.replace(request.params, close_early=close_early)
    answer = run(make_engine(choose=choose), msgspec.structs.replace(request, params=params))["a"]
    assert answer[0] == text
    assert answer[2].type == ("length" if may_go_on and not close_early else "stop")
