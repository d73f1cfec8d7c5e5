"""Tools together with `response_format`: the output is calls or else the object, in every API that has both."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import jsonschema
import pytest
from app_under_test import App
from byte_tokenizer import EOS
from fake_engine import make_engine
from openai_judge import joined_messages, judge, make_client
from samples import either, some
from served_app import ServedApp

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


def each_with_half_of_the_ways() -> list[tuple[dict, dict]]:
    """Return pairs that cover each format with and without strict, and with and without parallel calls."""
    every = [(asked, way, is_odd) for asked, is_odd in zip(FORMATS, (0, 1) * 2, strict=True) for way in WAYS]
    return [(asked, way) for asked, way, is_odd in every if (WAYS.index(way) in (1, 2)) == is_odd]


@pytest.mark.sampled
@pytest.mark.parametrize(("asked", "way"), either(list(itertools.product(FORMATS, WAYS)), each_with_half_of_the_ways()))
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


@pytest.mark.sampled
@pytest.mark.parametrize("strict", [True, False])
def test_whatever_is_drawn_is_valid_calls_or_a_valid_object(app: App, strict):
    body = {"tools": tools(strict=True), "response_format": form(strict=strict)}
    for seed in some(range(6), 2):
        choice = ask(app, "say:{", seed=seed, **body)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), ANSWER)
        choice = ask(app, "say:<", seed=seed, parallel_tool_calls=False, **body)
        assert choice["finish_reason"] == "tool_calls"
        assert called(choice)


def with_property(**schema) -> dict:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


@pytest.mark.sampled
@pytest.mark.parametrize("strict", [True, False])
def test_beside_strict_tools_a_guard_follows_the_answer_too(app: App, strict):
    items = {"type": "array", "items": {"enum": [*"abcdefghij"]}, "uniqueItems": True, "minItems": 3, "maxItems": 4}
    body = {"tools": tools(strict=True), "response_format": form(with_property(**items), strict=strict)}
    for seed in some(range(5), 2):
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
    with ServedApp(chat_template=template) as server, make_client(server.url) as client:
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


TOOL = {"name": "weather", "strict": True}
BUDGETED: dict[str, dict] = {
    "/v1/chat/completions": {
        "thinking_token_budget": 12,
        "tools": [{"type": "function", "function": {**TOOL, "parameters": CITY}}],
        "response_format": form(),
        "max_tokens": 200,
    },
    "/v1/responses": {
        "thinking_token_budget": 12,
        "tools": [{"type": "function", **TOOL, "parameters": CITY}],
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}},
        "max_output_tokens": 200,
    },
    "/v1/messages": {
        "model": "m",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{**TOOL, "input_schema": CITY}],
        "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
        "max_tokens": 1300,
    },
}
"""The routes that have a thinking budget, tools and a form of the answer, and a body for each."""

THOUGHTS = {
    "used up": "x",
    "used up by a call": CALL,
    "used up within the mark that ends it": "x" * 7 + "</thi",
    "ended by itself": "hm</think>",
    "ended at once": "</think>",
    "ended by EOS": "hm\0",
}


def make_thinking_engine(config=None, *, progress=None):
    """Make an engine that follows prompts of the form "think:THOUGHT|BYTE", where NUL is EOS: it thinks the thought and
    then letters. What comes after "</think>" begins with the byte, and is then random, as far as the grammar allows."""

    @functools.cache
    def script_of(prompt_ids):
        thought, _, rest = bytes(prompt_ids).partition(b"think:")[2].partition(b"|")
        return thought, rest[0], b"</think>" in rest

    def choose(token_id, state, outputs):
        thought, first, has_thought = script_of(state.prompt_ids)
        if has_thought:
            return token_id if outputs else first
        return (thought[len(outputs)] or EOS) if len(outputs) < len(thought) else ord("a") + token_id % 26

    engine, info = make_engine(config)
    engine.rows._runner._choose = choose
    return engine, info


@pytest.fixture(scope="module")
def thinking(template):
    file = Path(template).with_name("thinking.jinja")
    file.write_text(TEMPLATE + "{% if enable_thinking %}{% endif %}")
    with App(factory=make_thinking_engine, chat_template=str(file), reasoning_parser="deepseek-r1") as running:
        yield running


def answer_of(path: str, response) -> tuple[str, list[tuple[str, str]], str]:
    """Return the reasoning, the calls (name, arguments) and the content of an answer or of the stream of one."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert not any("error" in event and event["error"] for event in events), events[-1]
    if path == "/v1/chat/completions":
        [choice] = joined_messages(events) if events else response.json()["choices"]
        message, calls = choice["message"], choice["message"].get("tool_calls") or []
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        return message.get("reasoning_content") or "", named, message.get("content") or ""
    if path == "/v1/responses":
        items = (events[-1]["response"] if events else response.json())["output"]
        texts = {item["type"]: item["content"][0]["text"] for item in items if item["type"] != "function_call"}
        named = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        return texts.get("reasoning", ""), named, texts.get("message", "")
    if not events:
        blocks = response.json()["content"]
        named = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
        return (
            "".join(block.get("thinking", "") for block in blocks),
            named,
            "".join(block.get("text", "") for block in blocks),
        )
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    named = [
        (block["name"], "".join(delta.get("partial_json", "") for at, delta in deltas if at == index))
        for index, block in enumerate(starts)
        if block["type"] == "tool_use"
    ]
    return (
        "".join(delta.get("thinking", "") for _, delta in deltas),
        named,
        "".join(delta.get("text", "") for _, delta in deltas),
    )


def think(app: App, path: str, thought: str, first: str, **more) -> tuple[str, list[tuple[str, str]], str]:
    """Return the parts of an answer after a thought, of which the first byte is given; calls and object are checked."""
    prompt = f"think:{THOUGHTS[thought]}|{first}"
    asked = {"input": prompt} if path == "/v1/responses" else {"messages": [{"role": "user", "content": prompt}]}
    reasoning, calls, content = answer_of(path, app.post(path, **BUDGETED[path] | asked | {"seed": 1} | more))
    for name, arguments in calls:
        assert name == "weather"
        jsonschema.validate(json.loads(arguments), CITY)
    if content:
        jsonschema.validate(json.loads(content), ANSWER)
    return reasoning, calls, content


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("path", BUDGETED)
def test_after_its_thinking_budget_a_model_may_call_or_answer_in_the_form(thinking: App, path, thought):
    streams_calls = list(THOUGHTS).index(thought) % 2 == 0
    reasoning, calls, content = think(thinking, path, thought, "<", stream=streams_calls)
    assert (bool(calls), content) == (True, "")
    thought_of = THOUGHTS[thought].removesuffix("</think>").removesuffix("\0")
    assert reasoning.startswith(thought_of[: len(reasoning)])
    again, calls, content = think(thinking, path, thought, "{", stream=not streams_calls)
    assert (len(again), calls, bool(content)) == (len(reasoning), [], True)
    thinking.check_idle()


CALLS_AFTER_A_BUDGET = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"parallel_tool_calls": False},
    {"tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]},
    {"stop": ["never"]},
    {"separate_reasoning": False},
    {"n": 3},
]


@pytest.mark.parametrize("more", CALLS_AFTER_A_BUDGET)
def test_calls_after_a_thinking_budget_go_with_every_other_field(thinking: App, more):
    message = {"role": "user", "content": f"think:{THOUGHTS['used up']}|<"}
    response = thinking.post(PATH, **BUDGETED[PATH] | {"messages": [message], "seed": 1} | more)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    for choice in choices:
        [call, *_] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        jsonschema.validate(json.loads(call["function"]["arguments"]), {"type": "object"} if "tools" in more else CITY)
    assert len(choices) == more.get("n", 1)


def test_nothing_is_left_behind(app: App):
    app.check_idle()
