"""In every dialect: free text is cut by its limit and says so; what its last token completes says that it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from app_under_test import App

LIMIT = 48
CITY = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FUNCTION = {"name": "weather", "parameters": CITY, "strict": True}
STRICT = [{"type": "function", "function": FUNCTION}]
LOOSE = [{"type": "function", "function": FUNCTION | {"strict": False}}]
LARK = {"syntax": "lark", "definition": 'start: "go" | "stop"'}
CUSTOM = [{"type": "custom", "custom": {"name": "shell", "format": {"type": "grammar", "grammar": LARK}}}]
FLAT = [{"type": "function", **FUNCTION}]
TAGS = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</f>"}],
}
NEW = {"type": "structural_tag", "format": TAGS}
OLD = {"triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": CITY, "end": "</f>"}]}
TEMPLATE = "{# <tool_call> #}{% if tools %}{% endif %}{{ messages[-1]['content'] }}"

Place = Callable[[Any], Any]


class Api(NamedTuple):
    """A route, its body for a prompt and a limit, and the place of the finish reason in an answer and in a stream."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    place: Place
    last: Place


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def messages(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def choice(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]["finish_reason"]


def last_choice(text: str) -> Any:
    return [choice(event) for event in events(text) if event.get("choices")][-1]


def generate(**params: Any) -> Api:
    return Api(
        "/generate",
        lambda prompt, most: {"text": prompt, "sampling_params": {"max_new_tokens": most, **params}},
        lambda answer: answer["meta_info"]["finish_reason"]["type"],
        lambda text: events(text)[-1]["meta_info"]["finish_reason"]["type"],
    )


def completions(**fields: Any) -> Api:
    return Api(
        "/v1/completions", lambda prompt, most: {"prompt": prompt, "max_tokens": most, **fields}, choice, last_choice
    )


def chat(**fields: Any) -> Api:
    return Api(
        "/v1/chat/completions",
        lambda prompt, most: {"messages": messages(prompt), "max_tokens": most, **fields},
        choice,
        last_choice,
    )


def status(response: dict[str, Any]) -> Any:
    details = response["incomplete_details"]
    return response["status"] if details is None else (response["status"], details["reason"])


def responses(**fields: Any) -> Api:
    return Api(
        "/v1/responses",
        lambda prompt, most: {"input": prompt, "max_output_tokens": most, **fields},
        status,
        lambda text: status(events(text)[-1]["response"]),
    )


def anthropic(**fields: Any) -> Api:
    return Api(
        "/v1/messages",
        lambda prompt, most: {"model": "m", "messages": messages(prompt), "max_tokens": most, **fields},
        lambda answer: answer["stop_reason"],
        lambda text: next(e["delta"]["stop_reason"] for e in events(text) if e["type"] == "message_delta"),
    )


def ollama(**fields: Any) -> Api:
    return Api(
        "/api/chat",
        lambda prompt, most: {"model": "m", "messages": messages(prompt), "options": {"num_predict": most}, **fields},
        lambda answer: answer["done_reason"],
        lambda text: json.loads(text.splitlines()[-1])["done_reason"],
    )


def tgi(**parameters: Any) -> Api:
    return Api(
        "/generate_stream",
        lambda prompt, most: {"inputs": prompt, "parameters": {"max_new_tokens": most, "details": True, **parameters}},
        lambda answer: answer[0]["details"]["finish_reason"],
        lambda text: events(text)[-1]["details"]["finish_reason"],
    )


def mindie(**fields: Any) -> Api:
    """Its answers have no finish reason; they name what closed an output."""
    return Api(
        "/generate",
        lambda prompt, most: {"prompt": prompt, "max_tokens": most, **fields},
        lambda answer: answer.get("closed_early", False),
        lambda text: json.loads(text.split("\0")[-2]).get("closed_early", False),
    )


INPUT = {"name": "weather", "input_schema": CITY}
ONE = {"type": "auto", "disable_parallel_tool_use": True}
CUT = {
    "a new tag": (generate(structural_tag=NEW), "length"),
    "an old tag": (generate(structural_tag=OLD), "length"),
    "a completion": (completions(response_format=NEW), "length"),
    "a guided completion": (completions(guided_structural_tag=NEW), "length"),
    "a chat": (chat(response_format=NEW), "length"),
    "strict tools": (chat(tools=STRICT), "length"),
    "one call at most": (chat(tools=LOOSE, parallel_tool_calls=False), "length"),
    "a custom tool": (chat(tools=CUSTOM), "length"),
    "a response": (responses(tools=FLAT), ("incomplete", "max_output_tokens")),
    "a response with a custom tool": (
        responses(tools=[{"type": "custom", "name": "shell", "format": {"type": "grammar", **LARK}}]),
        ("incomplete", "max_output_tokens"),
    ),
    "a message": (anthropic(tools=[INPUT | {"strict": True}]), "max_tokens"),
    "a message with one call at most": (anthropic(tools=[INPUT], tool_choice=ONE), "max_tokens"),
    "ollama": (ollama(tools=LOOSE), "length"),
    "mindie": (mindie(guided_structural_tag=NEW), False),
}
ANSWER = '{"city": "Oslo"}'
TOOL = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
FLAT_FORM = {"type": "json_schema", "name": "x", "schema": CITY}
WHOLE = {
    "a schema": (generate(json_schema=CITY), ANSWER, "stop"),
    "a completion": (completions(response_format=FORM), ANSWER, "stop"),
    "a chat": (chat(response_format=FORM), ANSWER, "stop"),
    "a required call": (chat(tools=STRICT, tool_choice="required"), CALL, "tool_calls"),
    "a named call": (chat(tools=STRICT, tool_choice=TOOL), CALL, "tool_calls"),
    "one call at most": (chat(tools=STRICT, parallel_tool_calls=False), CALL, "tool_calls"),
    "a response": (responses(text={"format": FLAT_FORM}), ANSWER, "completed"),
    "a response with a call": (responses(tools=FLAT, tool_choice="required"), CALL, "completed"),
    "a message": (anthropic(output_config={"format": {"type": "json_schema", "schema": CITY}}), ANSWER, "end_turn"),
    "a message with a call": (anthropic(tools=[INPUT], tool_choice={"type": "any"}), CALL, "tool_use"),
    "ollama": (ollama(format=CITY), ANSWER, "stop"),
    "tgi": (tgi(grammar={"type": "json", "value": CITY}), ANSWER, "eos_token"),
}  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with App(chat_template=str(file)) as running:
        yield running


def ended(app: App, api: Api, prompt: str, most: int, *, stream: bool) -> Any:
    more = {} if api.path == "/generate_stream" else {"stream": stream}
    path = "/" if api.path == "/generate_stream" and not stream else api.path
    response = app.post(path, **api.body(prompt, most), **more)
    assert response.status_code == 200, response.text
    return api.last(response.text) if stream else api.place(response.json())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", CUT)
def test_free_text_says_that_its_limit_cut_it(app: App, name, stream):
    api, reason = CUT[name]
    assert ended(app, api, "tell me", LIMIT, stream=stream) == reason


@pytest.mark.parametrize("name", ["strict tools", "one call at most", "a custom tool"])
def test_a_chat_beside_tools_has_all_tokens_of_its_limit(app: App, name):
    answer = app.post("/v1/chat/completions", **CUT[name][0].body("tell me", LIMIT)).json()
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["message"]["content"]) == LIMIT


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_that_its_last_token_completes_is_whole(app: App, name, stream):
    api, said, reason = WHOLE[name]
    assert ended(app, api, f"say:{said}", len(said), stream=stream) == reason
