"""Outputs that must match something: by every field, in every form of the answer, and what is said when they cannot."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest
from app_under_test import App
from byte_tokenizer import EOS
from timeouts import until

from tureen.dialects.sglang import generate as sglang
from tureen.grammar import GrammarSpec
from tureen.grammar_service.check import CheckVerdict
from tureen.requests.generation import Run

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FITS = re.compile(r'\{"name": "[^"\\]{0,4}", "size": "(small|large)"\}')
CONSTRAINTS = {
    "json_schema": (CITY, FITS.pattern),
    "regex": ("(ab|cd){3}", "(ab|cd){3}"),
    "ebnf": ('root ::= "<" inner ">"\ninner ::= "x" | "(" inner ")"', r"<\(*x\)*>"),
    "structural_tag": (
        {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<n>",
                "content": {"type": "json_schema", "json_schema": {"enum": [1, 22]}},
                "end": "</n>",
            },
        },
        "<n>(1|22)</n>",
    ),
    "choice": (["yes", "no", "yes, but"], "yes|no|yes, but"),
    "dtype": ("bool", "True|False"),
}
KINDS = list(CONSTRAINTS)


def constrained(kind, **params):
    return {"max_new_tokens": 200, kind: CONSTRAINTS[kind][0], **params}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_output_matches_its_constraint_and_ends_with_it(app: App, kind, temperature):
    for seed in range(5):
        answer = app.generate(text="a", sampling_params=constrained(kind, temperature=temperature, seed=seed))
        assert re.fullmatch(CONSTRAINTS[kind][1], answer["text"])
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
        assert bytes(byte for byte in answer["output_ids"] if byte != EOS).decode() == answer["text"]
    app.check_idle()


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_a_constraint_may_be_an_object_or_its_text(app: App, kind):
    value = CONSTRAINTS[kind][0]
    params = {"temperature": 0, "max_new_tokens": 200}
    answers = [app.generate(text="a", sampling_params=params | {kind: one}) for one in (value, json.dumps(value))]
    assert answers[0]["text"] == answers[1]["text"]


def test_what_the_grammar_leaves_no_choice_about_is_not_drawn(app: App):
    def facts(**params):
        steps = app.client.stats.total_steps
        meta = app.generate(text="say:", sampling_params=params)["meta_info"]
        return meta["forced_tokens"], meta["completion_tokens"], app.client.stats.total_steps - steps

    num_forced, num_tokens, num_steps = facts(json_schema=CITY, max_new_tokens=200, temperature=1)
    assert num_forced >= len('{"name": "", "size": "small"}') - 3
    assert num_steps == num_tokens - num_forced


def test_an_output_without_any_choice_takes_no_step_unless_something_is_asked_of_the_model(app: App):
    steps = app.client.stats.total_steps
    answer = app.generate(text="a", sampling_params={"choice": ["exactly this"]})
    assert (answer["text"], app.client.stats.total_steps) == ("exactly this", steps)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord("s")}
    scored = app.generate(text="a", sampling_params={"choice": ["exactly this"]}, return_logprob=True)
    assert scored["output_ids"] == answer["output_ids"]
    assert [entry[1] for entry in scored["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert app.client.stats.total_steps == steps + 1
    hidden = app.generate(text="a", sampling_params={"choice": ["xy"]}, return_hidden_states=True)
    prompt, *output = hidden["meta_info"]["hidden_states"]
    assert (len(prompt), len(output)) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_change_nothing_and_come_for_every_token(app: App, kind):
    body = {"text": "a", "sampling_params": constrained(kind, seed=3)}
    plain = app.generate(**body)
    asked = app.generate(**body, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
    assert asked["output_ids"] == plain["output_ids"]
    entries = asked["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == plain["output_ids"]
    assert all(value <= 0 for value, _, _ in entries)
    assert len(asked["meta_info"]["output_top_logprobs"]) == len(entries)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", [{}, {"return_logprob": True}])
def test_a_stream_says_the_same(app: App, kind, asked):
    body = {"text": "a", "sampling_params": constrained(kind, seed=8), **asked}
    whole = app.generate(**body)
    *events, last = app.events(**body)
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for event in events:
        assert whole["text"].startswith(event["text"])
        if asked:
            assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])


def test_samples_of_one_prompt_each_match_and_differ(app: App):
    answers = app.generate(text="a", sampling_params=constrained("json_schema", n=6, seed=1))
    assert all(FITS.fullmatch(answer["text"]) for answer in answers)
    assert len({answer["text"] for answer in answers}) > 1


def test_an_answer_is_whole_within_any_limit_or_refused_with_the_least_that_will_do(app: App):
    response = app.post(text="a", sampling_params=constrained("json_schema") | {"max_new_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "max_new_tokens_too_small",
        "sampling_params.max_new_tokens",
    )
    least = int(re.search(r"send at least (\d+)", error["message"])[1])
    for most in (least, least + 1, least + 4):
        answer = app.generate(text="a", sampling_params=constrained("json_schema") | {"max_new_tokens": most})
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert FITS.fullmatch(answer["text"])
        assert answer["meta_info"]["completion_tokens"] <= most
    answer = app.generate(text="a", sampling_params={"regex": "a{9,}", "max_new_tokens": 12, "ignore_eos": True})
    assert (len(answer["text"]), answer["meta_info"]["closed_early"]) == (12, True)
    answer = app.generate(text="a", sampling_params={"regex": "a{200,}"})  # the usual limit is 128
    assert answer["meta_info"]["completion_tokens"] == 200


def test_the_length_cuts_where_it_is_asked_to_and_says_so(app: App):
    for most in (1, 5, 12):
        params = constrained("json_schema") | {"max_new_tokens": most, "close_early": False}
        answer = app.generate(text="a", sampling_params=params)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": most}
        assert len(answer["output_ids"]) == most


def test_a_stop_string_cuts_also_what_was_forced(app: App):
    answer = app.generate(text="a", sampling_params=constrained("json_schema", stop=['", "si']))
    assert re.fullmatch(r'\{"name": "[^"\\]{0,4}', answer["text"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": '", "si'}


def test_free_text_comes_first_until_the_marker(app: App):
    params = {"json_schema": CITY, "grammar_after": "w", "max_new_tokens": 2000, "temperature": 1}
    for seed in range(4):
        answer = app.generate(text="a", sampling_params=params | {"seed": seed})
        thought, _, rest = answer["text"].partition("w")
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert "w" not in thought
        assert FITS.fullmatch(rest)


def test_ignore_eos_goes_on_as_long_as_the_grammar_lets_it(app: App):
    params = {"regex": "b(cd)*", "max_new_tokens": 41, "temperature": 1}
    assert app.generate(text="a", sampling_params=params | {"ignore_eos": True})["text"] == "b" + "cd" * 20
    ended = app.generate(text="a", sampling_params={"regex": "b(cd){0,3}", "ignore_eos": True})
    assert (ended["text"], ended["meta_info"]["finish_reason"]["type"]) == ("bcdcdcd", "stop")


def test_min_new_tokens_keeps_an_output_going_but_not_beyond_its_grammar(app: App):
    params = {"regex": "b(cd)*", "max_new_tokens": 50, "min_new_tokens": 21, "temperature": 1}
    for seed in range(5):
        assert len(app.generate(text="a", sampling_params=params | {"seed": seed})["text"]) >= 21
    ended = app.generate(text="a", sampling_params={"regex": "b(cd){1,2}", "min_new_tokens": 100})
    assert (ended["text"], ended["meta_info"]["finish_reason"]["type"]) == ("bcdcd", "stop")


@pytest.mark.parametrize(
    ("params", "code", "says"),
    [
        ({"regex": "(ab"}, "invalid_regex", "sampling_params.regex"),
        ({"json_schema": {"type": "object", "minPropertys": 3}}, "invalid_json_schema", "minProperties"),
        ({"ebnf": 'root ::= item ","'}, "invalid_ebnf", "item"),
        ({"structural_tag": {"type": "structural_tag"}}, "invalid_structural_tag", "structural_tag"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "invalid_ebnf", "cannot go with"),
        ({"choice": ["a"], "dtype": "int"}, "invalid_dtype", "cannot go with"),
        ({"grammar_after": "</think>"}, "invalid_grammar_after", "needs a constraint for the text after it"),
        ({"json_schema": "{nonsense"}, "invalid_json_schema", "json_schema"),
        ({"json_schema": {"type": "objct"}}, "invalid_json_schema", "objct"),
        ({"json_schema": {"$ref": "https://a.b/c"}}, "invalid_json_schema", "https://a.b/c"),
        ({"regex": r"(a)\1"}, "invalid_regex", "regex"),
        ({"ebnf": 'root = "a"'}, "invalid_ebnf", "ebnf"),
        ({"ebnf": 'start ::= "a"'}, "invalid_ebnf", "root"),
        ({"choice": []}, "invalid_choice", "choice"),
        ({"choice": [1, 2]}, "invalid_choice", "choice"),
        ({"dtype": "complex"}, "invalid_dtype", "dtype"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused_by_name_and_nothing_else_changes(app: App, params, code, says, stream):
    response = app.post(text="a", sampling_params=params, stream=stream)
    error = response.json()["error"] if not stream or response.status_code == 400 else None
    assert response.status_code == 400, response.text
    assert (error["code"], error["type"]) == (code, error["type"])
    assert says in error["message"]
    assert error["param"].startswith("sampling_params.")
    assert app.generate(text="say:fine")["text"] == "fine"
    app.check_idle()


def test_a_server_without_a_backend_says_so():
    with App(grammar_backend="none") as app:
        assert "--grammar-backend none" in app.error(text="a", sampling_params={"regex": "a"})["message"]
        assert app.generate(text="say:fine")["text"] == "fine"


def test_an_output_that_does_not_match_after_all_is_an_error_that_is_counted():
    with App() as app:
        app.state.helpers.checker.check = lambda spec, text: CheckVerdict(f"{text} is wrong")
        response = app.post(text="a", sampling_params={"regex": "bb"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "grammar_mismatch"
        assert "bb is wrong" in response.json()["error"]["message"]
        assert app.metrics()["num_grammar_mismatch_total"] == 1
        streamed = app.post(text="a", sampling_params={"regex": "[ab]{3}c"}, stream=True)
        assert '"code":"grammar_mismatch"' in streamed.text  # an event, or the answer where nothing was sent before


UNSURE = {"type": "array", "not": {"type": "array", "uniqueItems": True}}
TAGS = {"type": "object", "properties": {"tags": UNSURE}, "required": ["tags"]}


def test_what_is_not_enforced_is_told_and_the_answer_is_judged(app):
    checker = app.state.helpers.checker
    before = app.metrics()["num_grammar_mismatch_total"]
    for text, is_valid in (('{"tags": [1, 1]}', True), ('{"tags": [1, 2]}', False)):
        assert (checker.check(GrammarSpec("json_schema", json.dumps(TAGS)), text).complaint is None) == is_valid
        answer = app.generate(text=f"say:{text}", sampling_params={"json_schema": TAGS, "max_new_tokens": 2000})
        assert answer["meta_info"]["unenforced"] == ["not at /tags"]
        fits = jsonschema.Draft202012Validator(TAGS).is_valid(json.loads(answer["text"]))
        assert answer["meta_info"]["valid"] is fits
    assert app.metrics()["num_grammar_mismatch_total"] == before
    plain = app.generate(text="say:x", sampling_params={"json_schema": {"type": "null"}})
    assert not {"unenforced", "valid"} & plain["meta_info"].keys()
    params = {"json_schema": TAGS, "max_new_tokens": 3, "close_early": False}
    cut = app.generate(text="say:x", sampling_params=params)
    assert cut["meta_info"]["unenforced"] == ["not at /tags"]
    assert "valid" not in cut["meta_info"]


def test_strict_refuses_by_name_what_cannot_be_enforced(app):
    error = app.error(text="a", sampling_params={"json_schema": TAGS, "strict_schema": True})
    assert error["code"] == "invalid_json_schema"
    assert "not" in error["message"]
    assert "#/properties/tags" in error["message"]
    error = app.error(text="a", sampling_params={"regex": "a", "strict_schema": True})
    assert error["param"] == "sampling_params.strict_schema"


def test_an_answer_that_breaks_what_is_not_enforced_says_so():
    with App() as app:
        app.state.helpers.checker.check = lambda spec, text: CheckVerdict("uniqueItems")
        answer = app.generate(text='say:{"tags": []}', sampling_params={"json_schema": TAGS, "max_new_tokens": 2000})
        assert answer["meta_info"]["valid"] is False
        app.state.helpers.checker.check = lambda spec, text: CheckVerdict("no time", is_verified=False)
        answer = app.generate(text='say:{"tags": []}', sampling_params={"json_schema": TAGS, "max_new_tokens": 2000})
        assert "valid" not in answer["meta_info"]


def test_what_a_stop_string_or_the_length_cut_is_not_checked():
    with App() as app:
        app.state.helpers.checker.check = lambda spec, text: CheckVerdict("wrong")
        for params in ({"stop": ["b"]}, {"max_new_tokens": 1, "close_early": False}, {"stop_token_ids": [ord("b")]}):
            assert app.post(text="a", sampling_params={"regex": "ab+", **params}).status_code == 200


def test_the_second_opinion_reads_the_tokens_and_not_the_text_that_stops_shaped():
    with App() as app:
        seen = []
        app.state.helpers.checker.check = lambda spec, text: seen.append((spec.kind, text))
        for params in ({}, {"no_stop_trim": True, "skip_special_tokens": False}):
            app.generate(text="say:x", sampling_params={"regex": "c{2,5}", **params})
        assert len(set(seen)) == 1
        assert seen[0] == ("regex", "cc")


def test_grammars_are_in_the_metrics(app: App):
    before = app.metrics()
    app.generate(text="a", sampling_params=constrained("json_schema"))
    app.post(text="a", sampling_params={"regex": "("})
    after = app.metrics()
    assert after["num_grammar_total"] - before["num_grammar_total"] == 2
    assert after["num_grammar_failed_total"] - before["num_grammar_failed_total"] == 1
    assert after["forced_tokens_total"] > before["forced_tokens_total"]
    assert after["num_grammar_queue_reqs"] == 0


def test_many_at_once_are_each_what_they_are_alone(app: App):
    bodies = [{"text": f"p{i}", "sampling_params": constrained(KINDS[i % len(KINDS)], seed=i)} for i in range(12)]
    bodies += [{"text": f"q{i}", "sampling_params": {"seed": i, "max_new_tokens": 30}} for i in range(4)]
    alone = [app.generate(**body)["output_ids"] for body in bodies]

    async def together():
        return await asyncio.gather(*(app.http.post("/generate", json=body) for body in bodies))

    assert [response.json()["output_ids"] for response in app.run(together())] == alone


class SlowJudge:
    """It judges when the engine has nothing more to do."""

    unverified = 0

    def __init__(self, app: App) -> None:
        self._app = app

    async def check_in_turn(self, *_: object) -> None:
        await until(lambda: not self._app.client.stats.num_running)

    def close(self) -> None:
        pass


def test_each_of_several_outputs_ends_once_however_long_it_is_judged(monkeypatch):
    async def ended(app: App) -> list[int]:
        body = {"text": "a", "sampling_params": constrained("json_schema", n=6, seed=1)}
        run, ends = Run(app.state, (await sglang.prepare(body, app.state)).plan), []
        async for output in run.updates(1):
            if output.finish is not None:
                ends.append(output.index)
            await until(lambda: not app.client.stats.num_running)  # a reader that is slower than the engine
        assert all(FITS.fullmatch(output.text) for output in run.outputs)
        return ends

    with App(slow=True) as app:
        monkeypatch.setattr(app.state.helpers, "_checker", SlowJudge(app))
        assert sorted(app.run(ended(app))) == list(range(6))
