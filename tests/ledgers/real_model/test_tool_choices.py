"""Tool choices on the real server with the real model, which is small: what was asked for holds all the same."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import jsonschema
import pytest
from server_process import ServerProcess

GUARDS = ("dialects", "text", "grammar", "grammar_service", "docs/tool-calls.md")

pytestmark = pytest.mark.model

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tool-calls.md").read_text(encoding="utf-8")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "light": LIGHT}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
MESSAGES = [{"role": "user", "content": "What will the weather be like in Paris tomorrow?"}]


def ask(server: ServerProcess, **body) -> dict:
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "seed": 1}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=fields | body, timeout=120)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice


def calls_of(choice: dict) -> list[str]:
    """The names; arguments are checked."""
    calls = choice["message"].get("tool_calls") or []
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_required_call_is_made_and_its_arguments_are_valid(server: ServerProcess, temperature):
    choice = ask(server, tool_choice="required", parallel_tool_calls=False, temperature=temperature)
    assert len(calls_of(choice)) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]


def test_a_named_tool_is_called_whatever_was_asked(server: ServerProcess):
    named = {"type": "function", "function": {"name": "light"}}
    assert calls_of(ask(server, tool_choice=named)) == ["light"]


def _conversation(*cities: str) -> list[dict]:
    """The tool was called for each of them: a small model does as was done before."""
    messages = []
    for city in cities:
        arguments = json.dumps({"city": city, "days": 1, "unit": "celsius"})
        call = {"id": f"call_{city}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages += [
            {"role": "user", "content": f"What will the weather be like in {city} tomorrow?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ]
    return messages + MESSAGES


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_may_call_a_tool_calls_it(server: ServerProcess, strict):
    tools = [{"type": "function", "function": one["function"] | {"strict": strict}} for one in TOOLS]
    choice = ask(server, tools=tools, messages=_conversation("Rome", "Oslo", "Lima"), temperature=0)
    assert calls_of(choice) == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] == "Paris"


def test_a_strict_tool_is_called_right_however_wildly_tokens_are_drawn(server: ServerProcess):
    tools = [{"type": "function", "function": one["function"] | {"strict": True}} for one in TOOLS]
    fields = {"tools": tools, "messages": _conversation("Rome", "Oslo", "Lima"), "parallel_tool_calls": False}
    called = [calls_of(ask(server, **fields, temperature=1.5, seed=seed, max_tokens=150)) for seed in range(6)]
    assert max(map(len, called)) == 1


def test_what_cannot_be_enforced_is_refused_under_the_name_of_its_tool(server: ServerProcess):
    wrong = {"type": "object", "properties": {"a": {"type": "string", "minLenght": 3}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "wrong", "parameters": wrong}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[2].function.parameters"
    assert "minLenght" in error["message"]


def test_the_commands_of_the_page_work(server: ServerProcess):
    blocks = re.findall(r"```\n(curl.*?)\n```", PAGE, re.DOTALL)
    commands = [part for block in blocks for part in re.split(r"\n(?=curl )", block)]
    assert len(commands) == 4
    answers = []
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        path = re.sub(r"http://127\.0\.0\.1:\d+", "", words[1])
        body = json.loads(words[words.index("-d") + 1])
        response = httpx.post(server.url + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        answers.append(response.json())
    chat, custom, calls, reasoning = answers
    assert chat["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    call = custom["choices"][0]["message"]["tool_calls"][0]["custom"]
    assert call["name"] == "sum"
    assert re.fullmatch(r"[0-9]{1,4}(?:\+[0-9]{1,4}){1,3}", call["input"])
    assert calls["calls"] == [{"tool_index": 0, "name": "weather", "parameters": '{"city": "Paris"}'}]
    assert reasoning == {"reasoning_text": "3 + 4 = 7", "text": "It is 7."}
