"""Log-probabilities of a response's text, and conversations that lose their oldest turns."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pydantic
import pytest
from app_under_test import App
from openai.types.responses import Response, ResponseStreamEvent

PATH = "/v1/responses"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
INCLUDE = {"include": ["message.output_text.logprobs"]}
LAST = "{# <tool_call> <think> #}{{ '' if tools }}{{ messages[-1]['content'] }}"
ALL = (
    "{# <tool_call> #}say:{% for message in messages %}{{ message['role'][0] }}{{ message['content'][:8] | trim }};"
    "{% endfor %}{% for message in messages %}{{ message['content'] | length * '~' }}{% endfor %}"
)
"""The model is sent what was said last;
or it says who said what, after which come as many marks as there are letters."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text(LAST)
    with App(chat_template=str(file)) as running:
        yield running


def part_of(answer: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate(answer, strict=True, extra="forbid")
    [message] = [item for item in answer["output"] if item["type"] == "message"]
    return message["content"][0]


def joined(entries: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("say:héllo", "héllo"),
        ("say:<think>yes or no: yes</think>yes", "yes"),
        (f"say:let me see {CALL}", "let me see"),
        ("say:", ""),
    ],
)
def test_the_text_has_log_probabilities_and_nothing_else_has(app: App, said, text):
    asked = {"input": said, "tools": [WEATHER], **INCLUDE, "top_logprobs": 2}
    part = part_of(app.post(PATH, **asked).json())
    assert (part["text"], joined(part["logprobs"])) == (text, text)
    for entry in part["logprobs"]:
        assert len(entry["top_logprobs"]) == 2
    events = [
        json.loads(line[6:]) for line in app.post(PATH, **asked, stream=True).text.splitlines() if line[:5] == "data:"
    ]
    for event in events:
        EVENT.validate_python(event, strict=True, extra="forbid")
    deltas = [entry for event in events if event["type"].endswith("output_text.delta") for entry in event["logprobs"]]
    plain = [{name: entry[name] for name in ("token", "logprob")} for entry in part["logprobs"]]
    assert [{name: entry[name] for name in ("token", "logprob")} for entry in deltas] == plain
    assert part_of(events[-1]["response"])["logprobs"] == part["logprobs"]


def test_they_are_those_that_chats_have(app: App):
    asked = {"seed": 5, "temperature": 0.7, "top_logprobs": 3}
    chat = app.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "abc"}], logprobs=True, max_tokens=12, **asked
    ).json()["choices"][0]
    part = part_of(app.post(PATH, input="abc", max_output_tokens=12, **asked).json())
    assert part["text"] == chat["message"]["content"]
    assert part["logprobs"] == chat["logprobs"]["content"][: len(part["logprobs"])]
    assert part["logprobs"]


def test_without_being_asked_for_there_are_none(app: App):
    assert part_of(app.post(PATH, input="say:a").json())["logprobs"] == []
    assert part_of(app.post(PATH, input="say:a", top_logprobs=0).json())["logprobs"] == []
    [entry] = part_of(app.post(PATH, input="say:a", **INCLUDE).json())["logprobs"]
    assert entry["top_logprobs"] == []
    assert app.post(PATH, input="say:a", logprobs_mode="raw", **INCLUDE).status_code == 200


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    (folder / "all.jinja").write_text(ALL)
    with App(chat_template=str(folder / "all.jinja"), responses_store=str(folder / "store.db")) as running:
        yield running


def turn(role: str, number: int, size: int = 220) -> dict[str, str]:
    return {"role": role, "content": f"{number}".ljust(size, "x")}


def ask(app: App, items: Any, status: int = 200, **body: Any) -> httpx.Response:
    response = app.post(PATH, **({"input": items, "truncation": "auto"} | body))
    assert response.status_code == status, response.text
    return response


def said(response: httpx.Response) -> str:
    text = response.json()["output"][0]["content"][0]["text"]
    return "".join(entry[: 1 + len(entry[1:].rstrip("x"))] + ";" for entry in text.split("~")[0].split(";")[:-1])


LONG = [turn("user" if number % 2 == 0 else "assistant", number) for number in range(13)]


def test_the_oldest_turns_are_dropped_and_told_and_no_more_than_it_takes(small):
    response = ask(small, [turn("developer", 0, 50), *LONG], max_output_tokens=150)
    kept = said(response)
    assert kept.startswith("s0;")
    assert kept.endswith("a11;u12;")
    told = response.headers["x-tureen-ignored"].split(", ")
    dropped = len(told)
    assert told == [f"input[{number}]" for number in range(1, dropped + 1)]
    assert response.json()["metadata"]["truncated_items"] == str(dropped)
    assert response.json()["truncation"] == "auto"
    rest = [turn("developer", 0, 50), *LONG[dropped:]]
    assert said(ask(small, rest, truncation="disabled", max_output_tokens=150)) == kept
    longer = [turn("developer", 0, 50), *LONG[dropped - 2 :]]
    ask(small, longer, 400, truncation="disabled", max_output_tokens=150)


def test_what_fits_is_left_as_it_is(small):
    response = ask(small, LONG[:3])
    assert said(response) == "u0;a1;u2;"
    assert "x-tureen-ignored" not in response.headers
    assert "truncated_items" not in response.json()["metadata"]


def test_a_call_goes_with_its_result_and_the_last_question_stays(small):
    steps = []
    for number in range(8):
        call = {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}
        steps += [
            call,
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"{number}".ljust(300, "x")},
        ]
    response = ask(small, [turn("user", 0), turn("assistant", 1), turn("user", 2), *steps], max_output_tokens=150)
    told = response.headers["x-tureen-ignored"].split(", ")
    assert told[:2] == ["input[0]", "input[1]"]
    assert told[2:] == [f"input[{3 + number}]" for number in range(len(told) - 2)]
    assert len(told) % 2 == 0, "a call without its result would be left"
    steps_left = said(response).removeprefix("u2;")
    assert steps_left == "a<tool_ca;u<tool_re;" * (8 - (len(told) - 2) // 2), "steps as they are shown without tools"


def test_what_cannot_be_shortened_enough_is_refused(small):
    refused = ask(small, [turn("system", 0, 2400), turn("user", 1)], 400).json()["error"]
    assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
    ask(small, "x" * 2400, 400)
    ask(small, [*LONG, turn("user", 13, 2400)], 400)


def test_turns_of_a_kept_conversation_are_dropped_too(small):
    first = ask(small, LONG[:5], max_output_tokens=150).json()
    second = ask(small, [turn("user", 6, 1000)], previous_response_id=first["id"], max_output_tokens=150)
    told = second.headers["x-tureen-ignored"].split(", ")
    assert told[0] == "previous_response_id[0]"
    assert said(second).endswith("u6;")
