"""Reading a text for tool calls and reasoning, without a model."""

import json

import pytest
from app_under_test import App

CALLS = "/parse_function_call"
REASONING = "/separate_reasoning"


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = [tool("get_time"), tool("get_weather")]
TEXT = 'Look:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def test_calls_come_as_sglang_documents_them(app: App):
    answer = app.post(CALLS, text=TEXT, tools=TOOLS, tool_call_parser="qwen25")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "normal_text": "Look:",
        "calls": [{"tool_index": 1, "name": "get_weather", "parameters": '{"city": "Zürich"}'}],
    }


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3", '{"name": "get_time", "parameters": {}}; {"name": "get_weather", "parameters": {"a": [1]}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get_time"}, {"name": "get_weather", "arguments": {"a": [1]}}]'),
        ("pythonic", "[get_time(), get_weather(a=[1])]"),
    ],
)
def test_every_format_can_be_asked_for(app: App, parser, text):
    answer = app.post(CALLS, text=text, tools=TOOLS, tool_call_parser=parser).json()
    found = [(call["tool_index"], json.loads(call["parameters"])) for call in answer["calls"]]
    assert found == [(0, {}), (1, {"a": [1]})]
    assert answer["normal_text"] == ""


def test_a_call_of_no_known_tool_is_text(app: App):
    assert app.post(CALLS, text=TEXT, tools=[], tool_call_parser="hermes").json() == {"normal_text": TEXT, "calls": []}


def test_without_a_name_calls_are_read_as_the_chat_routes_would():
    text = "[get_time()]"
    with App(tool_call_parser="pythonic") as app:
        assert len(app.post(CALLS, text=text, tools=TOOLS).json()["calls"]) == 1
    with App(tool_call_parser="none") as app:
        error = app.post(CALLS, text=text, tools=TOOLS)
        assert error.status_code == 400
        assert error.json()["error"]["param"] == "tool_call_parser"


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "answer"),
    [
        ("deepseek-r1", "3 + 4 = 7\n</think>\n\nIt is 7.", "3 + 4 = 7", "It is 7."),
        ("qwen3", "<think>\n3 + 4 = 7\n</think>\n\nIt is 7.", "3 + 4 = 7", "It is 7."),
        ("qwen3", "It is 7.", "", "It is 7."),
        ("mistral", "[THINK]3 + 4 = 7[/THINK]It is 7.", "3 + 4 = 7", "It is 7."),
        (
            "openai_gptoss",
            "<|channel|>analysis<|message|>3 + 4 = 7<|end|><|start|>assistant<|channel|>final<|message|>It is 7.",
            "3 + 4 = 7",
            "It is 7.",
        ),
    ],
)
def test_reasoning_is_told_apart_as_sglang_documents_it(app: App, parser, text, reasoning, answer):
    got = app.post(REASONING, text=text, reasoning_parser=parser, return_blocks=False)
    assert got.status_code == 200, got.text
    assert got.json() == {"reasoning_text": reasoning, "text": answer}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CALLS, {"tools": TOOLS}, "text"),
        (CALLS, {"text": "x"}, "tools"),
        (CALLS, {"text": 7, "tools": TOOLS}, "text"),
        (CALLS, {"text": "x" * (2**20 + 1), "tools": []}, "text"),
        (CALLS, {"text": "x", "tools": [tool("a b")]}, "tools[0].function.name"),
        (CALLS, {"text": "x", "tools": TOOLS, "tool_call_parser": "herms"}, "tool_call_parser"),
        (CALLS, {"text": "x", "tools": TOOLS, "tool_call_parser": 7}, "tool_call_parser"),
        (CALLS, {"text": "x", "tools": TOOLS, "parser": "hermes"}, "parser"),
        (REASONING, {"text": "x"}, "reasoning_parser"),
        (REASONING, {"reasoning_parser": "qwen3"}, "text"),
        (REASONING, {"text": "x", "reasoning_parser": "qwen"}, "reasoning_parser"),
        (REASONING, {"text": "x", "reasoning_parser": "qwen3", "return_blocks": True}, "return_blocks"),
        (REASONING, {"text": "x", "reasoning_parser": "qwen3", "blocks": 1}, "blocks"),
    ],
)
def test_a_field_that_is_missing_wrong_or_unknown_is_named(app: App, path, body, field):
    answer = app.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert field in answer.json()["error"]["message"]
