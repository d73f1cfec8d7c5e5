"""Tools together with `response_format`: the output is calls or else the object, in every API that has both."""

from __future__ import annotations

import json

import jsonschema
import pytest
from app_under_test import App, LiveServer
from openai_judge import judge, make_client

TEMPLATE = "{# <tool_call> <think> #}{% if tools %}{% endif %}{{ messages[-1]['content'] }}"
PATH = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"warm": {"type": "boolean"}, "say": {"type": "string", "maxLength": 4}},
    "required": ["warm", "say"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OBJECT = '{"warm": true, "say": "a"}'


def tools(*, strict: bool) -> list[dict]:
    names = ("weather", "clock")
    function = {"parameters": CITY, "strict": strict}
    return [{"type": "function", "function": {"name": name, **function}} for name in names]


def form(schema=ANSWER, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def app(template):
    with App(chat_template=template) as running:
        yield running


def ask(app: App, said: str, status: int = 200, **body):
    fields = {"messages": [{"role": "user", "content": said}], "max_tokens": 300, "seed": 1} | body
    response = app.post(PATH, **fields)
    assert response.status_code == status, response.text
    if status == 200:
        judge(response.json())
        [choice] = response.json()["choices"]
        return choice
    return response.json()["error"]


def called(choice: dict) -> list[str]:
    """Returns the names of the tools called; arguments are checked."""
    calls = choice["message"]["tool_calls"] or []
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    return [call["function"]["name"] for call in calls]


FORMATS = [form(strict=True), form(), {"type": "json_object"}, {"type": "regex", "value": r"\{.*\}"}]
WAYS = [{"strict": True}, {"strict": False}, {"strict": True, "parallel": False}, {"strict": False, "parallel": False}]


@pytest.mark.parametrize("asked", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_may_call_or_answer_in_the_form(app: App, asked, way):
    body = {
        "tools": tools(strict=way["strict"]),
        "response_format": asked,
        "parallel_tool_calls": way.get("parallel", True),
    }
    answer = ask(app, f"say:{OBJECT}", **body)
    assert answer["message"]["content"] == OBJECT
    assert (answer["message"]["tool_calls"], answer["finish_reason"]) == (None, "stop")
    call = ask(app, f"say:{CALL}", **body)
    assert (called(call), call["finish_reason"]) == (["weather"], "tool_calls")
    assert call["message"]["content"] is None
    both = called(ask(app, f"say:{CALL}\n{CALL}", **body))
    assert both == ["weather"] * (2 if way.get("parallel", True) else 1)


@pytest.mark.parametrize("strict", [True, False])
def test_whatever_is_drawn_is_valid_calls_or_a_valid_object(app: App, strict):
    body = {"tools": tools(strict=True), "response_format": form(strict=strict)}
    for seed in range(6):
        choice = ask(app, "say:{", seed=seed, **body)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), ANSWER)
        choice = ask(app, "say:<", seed=seed, parallel_tool_calls=False, **body)
        assert choice["finish_reason"] == "tool_calls"
        assert called(choice)


def with_property(**schema) -> dict:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize("strict", [True, False])
def test_beside_strict_tools_a_guard_follows_the_answer_too(app: App, strict):
    items = {"type": "array", "items": {"enum": [*"abcdefghij"]}, "uniqueItems": True, "minItems": 3, "maxItems": 4}
    body = {"tools": tools(strict=True), "response_format": form(with_property(**items), strict=strict)}
    for seed in range(5):
        choice = ask(app, "say:{", seed=seed, **body)
        jsonschema.validate(json.loads(choice["message"]["content"]), with_property(**items))
        assert "unenforced" not in choice
    assert called(ask(app, f"say:{CALL}", **body))


TWICE = with_property(type="string", pattern=r"^([ab])\1$", maxLength=2)


def test_strict_tools_do_not_make_the_answer_strict(app: App):
    choice = ask(app, 'say:{"x": "ab"}', tools=tools(strict=True), response_format=form(TWICE))
    assert choice["unenforced"] == ["pattern at /x"]
    asked = form(TWICE, strict=True)
    refusal = ask(app, 'say:{"x": "ab"}', 400, tools=tools(strict=True), response_format=asked)
    assert refusal["param"] == "response_format.json_schema.schema"


def test_a_strict_tool_does_not_make_another_one_strict(app: App):
    other = {"type": "function", "function": {"name": "other", "parameters": TWICE}}
    body = {"tools": [*tools(strict=True), other], "tool_choice": "required", "parallel_tool_calls": False}
    assert ask(app, f"say:{CALL}", **body)["finish_reason"] == "tool_calls"
    other["function"]["strict"] = True
    assert "parameters" in ask(app, f"say:{CALL}", 400, **body)["param"]


def test_choices_combine(app: App):
    body = {"tools": tools(strict=True), "response_format": form(strict=True)}
    assert called(ask(app, f"say:{OBJECT}", tool_choice="required", parallel_tool_calls=False, **body))
    clock = {"type": "function", "function": {"name": "clock"}}
    assert called(ask(app, f"say:{OBJECT}", tool_choice=clock, **body)) == ["clock"]
    answer = ask(app, f"say:{CALL}", tool_choice="none", **body)["message"]
    assert answer["tool_calls"] is None
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 300, **body}
    told = app.post(PATH, **asked, tool_choice="required").headers["x-tureen-ignored"]
    assert told == "response_format.json_schema.schema"
    assert "x-tureen-ignored" not in app.post(PATH, **asked).headers
    jsonschema.validate(json.loads(answer["content"]), ANSWER)


def test_reasoning_comes_before_either(app: App):
    body = {"tools": tools(strict=True), "response_format": form(), "grammar_after": "</think>"}
    for said, is_call in ((OBJECT, False), (CALL, True)):
        choice = ask(app, f"say:<think>which?</think>{said}", **body)
        assert choice["message"]["reasoning_content"] == "which?"
        assert bool(called(choice)) is is_call
        assert choice["message"]["content"] == (None if is_call else OBJECT)


@pytest.mark.parametrize("said", [OBJECT, CALL, "abc"])
def test_a_stream_says_the_same(template, said):
    with LiveServer(chat_template=template) as server, make_client(server.url) as client:
        asked = {
            "model": "fake-model",
            "messages": [{"role": "user", "content": f"say:{said}"}],
            "tools": tools(strict=True),
            "response_format": form(strict=True),
            "seed": 4,
        }
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert (final.message.content or "") == (whole.message.content or "")
        assert final.finish_reason == whole.finish_reason

        def arguments(message):
            return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]

        assert arguments(final.message) == arguments(whole.message)


def test_an_answer_is_judged_by_its_schema_and_a_call_is_not(app: App):
    schema = {**ANSWER, "properties": {**ANSWER["properties"], "say": {"type": "string", "format": "idn-email"}}}
    odd = {"not": {"type": "object", "properties": {"say": {"const": "no"}}, "required": ["say"]}}
    body = {"tools": tools(strict=False), "response_format": form({**schema, **odd})}
    calm = ask(app, f"say:{OBJECT}", **body)
    if "unenforced" in calm:
        assert calm["valid"] is True
        assert ask(app, 'say:{"warm": true, "say": "no"}', **body)["valid"] is False
    assert "valid" not in ask(app, f"say:{CALL}", **body)


ERRORS = [
    ({"response_format": form({"type": "strin"})}, "response_format.json_schema.schema"),
    ({"json_schema": "{"}, "json_schema"),
    ({"regex": "("}, "regex"),
    ({"ebnf": "root ::= other"}, "ebnf"),
    ({"dtype": "int"}, "dtype"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"minLenght": 3}}}}}], "response_format": form()},
     "tools[0].function.parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), ERRORS)
def test_a_fault_is_found_under_the_clients_own_name(app: App, fields, param):
    error = ask(app, "abc", 400, **{"tools": tools(strict=True)} | fields)
    assert error["param"] == param, error


CONSTRAINTS = [
    ({"regex": "ab+"}, "abb"),
    ({"choice": ["yes", "n(o"]}, "n(o"),
    ({"ebnf": 'root ::= "x" "y"*'}, "xyy"),
    ({"json_schema": "$$ANY$$"}, "[1]"),
    ({"json_schema": json.dumps(ANSWER)}, OBJECT),
]


@pytest.mark.parametrize(("constraint", "text"), CONSTRAINTS)
def test_every_constraint_stands_beside_calls(app: App, constraint, text):
    assert ask(app, f"say:{text}", tools=tools(strict=False), **constraint)["message"]["content"] == text
    assert called(ask(app, f"say:{CALL}", tools=tools(strict=False), **constraint)) == ["weather"]


def test_a_structural_tag_says_itself_where_calls_may_stand(app: App):
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert called(ask(app, f"say:{CALL}", tools=tools(strict=False), structural_tag=tag)) == ["weather"]
    error = ask(app, "abc", 400, tools=tools(strict=True), structural_tag=tag)
    assert error["param"] == "structural_tag"


def test_responses_call_or_answer_in_the_form_too(app: App):
    body = {
        "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}},
        "max_output_tokens": 300,
    }
    for said, kind in ((OBJECT, "message"), (CALL, "function_call")):
        response = app.request("POST", "/v1/responses", json={"input": f"say:{said}", **body})
        assert response.status_code == 200, response.text
        assert [item["type"] for item in response.json()["output"]] == [kind]
        stream = app.request("POST", "/v1/responses", json={"input": f"say:{said}", **body, "stream": True})
        [*_, last] = [line for line in stream.text.splitlines() if line.startswith("data: ")]
        assert json.loads(last.removeprefix("data: "))["response"]["output"][0]["type"] == kind


def test_nothing_is_left_behind(app: App):
    app.check_idle()
