"""Anthropic's API: what has no effect is told, what its own servers run is left out, and prompts are counted as they
are taken."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import tiny_llava
from anthropic.types import Message
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from PIL import Image
from samples import either

from tureen.media.loader import MediaLoader

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{# <tool_call> <think> #}{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% if enable_thinking is defined %}{{ 'yes ' if enable_thinking else 'no ' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['reasoning_content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{{ '\n' if not loop.last }}{% endfor %}"
)
"""A template that shows the model all that there is in a chat."""

WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {"name": "time", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "allowed_domains": ["example.org"]}
SERVERS = [
    SEARCH,
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    {"type": "mcp_toolset", "mcp_server_name": "mine"},
]
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
NO_MORE = {"trigger": {"type": "input_tokens", "value": 10**6}}


def _user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


def _text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.fixture(scope="module")
def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.effect_noise((28, 28), 50).convert("RGB").save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    file = tmp_path_factory.mktemp("templates") / "all.jinja"
    file.write_text(TEMPLATE)
    settings = {"model_type": "clip_vision_model", **tiny_llava.CLIP}
    model = {"model_type": "llava", "vision_config": settings, "text_config": {}, "image_token_index": VOCAB_SIZE}
    loader = MediaLoader(model, tiny_llava.PREPROCESSORS["llava-clip"], media_path=None, allowed_domains=())
    with App(media=loader, special=("<image>",), chat_template=str(file)) as running:
        yield running


def _ask(app: App, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"model": "default", "max_tokens": 4, "messages": _user("a")} | body
    response = app.request("POST", PATH, json=body, headers=headers or {})
    assert response.status_code == status, response.text
    answer = response.json()
    if status == 200:
        answer.pop("closed_early", None)  # said besides
        Message.model_validate(answer, strict=True, extra="forbid")
    else:
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    return response


def _refusal(app: App, **body: Any) -> str:
    message: str = _ask(app, 400, **body).json()["error"]["message"]
    return message


def _told(app: App, **body: Any) -> str:
    told: str = _ask(app, **body).headers.get("x-tureen-ignored", "")
    return told


def _count(app: App, **body: Any) -> int:
    response = app.post(COUNT, **{"model": "default", "messages": _user("a")} | body)
    assert response.status_code == 200, response.text
    count: int = response.json()["input_tokens"]
    return count


TOLD = [
    ({"tools": [WEATHER | {"eager_input_streaming": True}]}, "tools[0].eager_input_streaming"),
    ({"tools": [WEATHER, TIME | {"eager_input_streaming": False}]}, "tools[1].eager_input_streaming"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [WEATHER | {"defer_loading": False, "eager_input_streaming": None}]}, ""),
    ({"tools": [WEATHER | {"allowed_callers": ["direct", "code_execution_20260120"]}]}, ""),
    ({"tools": [WEATHER | CACHED]}, "tools[0].cache_control"),
    ({"cache_control": {"type": "ephemeral"}}, "cache_control"),
    ({"system": [_text("x"), _text("y", **CACHED)]}, "system[1].cache_control"),
    ({"messages": _user(_text("a", **CACHED), _text("b"))}, "messages[0].content[0].cache_control"),
    ({"messages": _user(_text("a", citations=[{"type": "char_location"}]), _text("b"))},
     "messages[0].content[0].citations"),
    ({"messages": [*_user("a"), {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "eA=="}]},
                   *_user("b")]}, "messages[1].content[0]"),
    ({"output_config": {"effort": "max"}}, "output_config.effort"),
    ({"speed": "fast"}, "speed"),
    ({"speed": "standard"}, ""),
    ({"inference_geo": "us"}, "inference_geo"),
    ({"inference_geo": "global"}, ""),
    ({"container": {"id": "c", "skills": []}}, "container"),
    ({"betas": ["context-1m-2025-08-07"], "zebra": {"a": 1}}, "betas, zebra"),
    ({"fallbacks": "default", "diagnostics": {"previous_message_id": None}}, "fallbacks, diagnostics"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
     "context_management.edits[0]"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919", **NO_MORE}]}},
     "context_management.edits[0]"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "told"), TOLD)
def test_what_has_no_effect_is_told_and_counted_alike(app: App, fields, told):
    assert _told(app, **fields) == told
    response = app.post(COUNT, **{"model": "default", "messages": _user("a")} | fields)
    assert (response.status_code, response.headers.get("x-tureen-ignored", "")) == (200, told)


def test_a_stream_tells_the_same_before_it_begins(app: App):
    assert _ask_stream(app, tools=[WEATHER | CACHED, SEARCH]) == "tools[0].cache_control, tools[1]"


def _ask_stream(app: App, **fields: Any) -> str:
    response = app.post(PATH, model="default", max_tokens=4, messages=_user("a"), stream=True, **fields)
    assert response.text.startswith("event: message_start\n")
    told: str = response.headers["x-tureen-ignored"]
    return told


def test_a_user_s_name_and_the_tier_have_an_effect(app: App):
    assert _told(app, metadata={"user_id": "me"}, service_tier="auto") == ""


def test_who_asks_for_errors_gets_them_in_the_api_s_form(app: App):
    message = _ask(app, 400, {"x-tureen-strict": "1"}, tools=[WEATHER | CACHED]).json()["error"]["message"]
    assert message.startswith("tools[0].cache_control would have no effect")


@pytest.mark.parametrize("tool", SERVERS)
def test_tools_that_another_server_runs_are_left_out_beside_the_client_s_own(app: App, tool):
    assert _told(app, tools=[tool, WEATHER]) == "tools[0]"
    assert _told(app, tools=[WEATHER, tool], tool_choice={"type": "any"}, max_tokens=60) == "tools[1]"
    assert _told(app, tools=[tool], tool_choice={"type": "none"}) == "tools[0]"
    assert _count(app, tools=[tool, WEATHER]) == _count(app, tools=[WEATHER])


@pytest.mark.parametrize("tool", SERVERS)
def test_tools_that_another_server_runs_are_left_out_alone_too_and_refused_where_they_are_demanded(app: App, tool):
    name = tool.get("name", tool.get("mcp_server_name"))
    assert _told(app, tools=[tool]) == "tools[0]"
    assert _count(app, tools=[tool]) == _count(app)
    demanded = _refusal(app, tools=[WEATHER, tool], tool_choice={"type": "tool", "name": name})
    assert demanded.startswith(f"tool_choice.name '{name}' names a tool that only Anthropic's servers run")
    assert "tool" in _refusal(app, tools=[tool], tool_choice={"type": "any"})


def test_servers_of_tools_are_left_out(app: App):
    servers = [{"type": "url", "url": "https://example.org/mcp", "name": "mine"}]
    assert _told(app, mcp_servers=servers, tools=[WEATHER]) == "mcp_servers"
    assert _told(app, mcp_servers=servers) == "mcp_servers"
    assert _told(app, mcp_servers=[]) == ""


def test_errors_name_a_tool_by_its_place_in_the_list_that_was_sent(app: App):
    bad = {"name": "bad", "input_schema": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}
    for tools in ([SEARCH, WEATHER, bad | {"strict": True}], [WEATHER | {"strict": True}, SEARCH, bad]):
        fields = {} if tools[2].get("strict") else {"tool_choice": {"type": "tool", "name": "bad"}}
        assert _refusal(app, tools=tools, **fields).startswith("tools[2].input_schema")
    assert _refusal(app, tools=[SEARCH, WEATHER, WEATHER]).startswith("tools[2].name")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 10}}, "edits[0] could"),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 10**6}}, "edits[0] could"),
        ({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}}, "edits[0] could"),
        ({"type": "forget"}, "edits[0].type"),
        ({}, "edits[0].type"),
    ],
)
def test_edits_of_the_conversation_that_could_come_into_effect_are_refused(app: App, edit, named):
    assert _refusal(app, context_management={"edits": [edit]}).startswith(f"context_management.{named}")


CHOICES = [
    {"type": kind, "disable_parallel_tool_use": single, **({"name": "time"} if kind == "tool" else {})}
    for kind in ("auto", "any", "tool", "none")
    for single in (False, True)
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_tool_choice_is_kept_with_strict_tools_and_without(app: App, choice, strict):
    tools = [WEATHER | {"strict": strict}, TIME]
    message = _ask(app, tools=tools, tool_choice=choice, max_tokens=300, temperature=0).json()
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    if choice["type"] in ("any", "tool"):
        assert message["content"][0]["type"] == "tool_use"
    if choice["type"] == "none":
        assert calls == []
    if choice["type"] == "tool":
        assert {call["name"] for call in calls} == {"time"}
    if choice["disable_parallel_tool_use"]:
        assert len(calls) <= 1
    if message["stop_reason"] == "tool_use":
        for call in calls:
            if call["name"] == "weather":
                jsonschema.validate(call["input"], WEATHER["input_schema"])


def test_strict_tools_stand_beside_a_form_of_the_answer_by_either_name(app: App):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        for tools in ([], [WEATHER | {"strict": True}]):
            for block in _ask(app, tools=tools, max_tokens=60, **fields).json()["content"]:
                if block["type"] == "tool_use":
                    jsonschema.validate(block["input"], WEATHER["input_schema"])
                else:
                    jsonschema.validate(json.loads(block["text"]), schema)
    assert _told(app, output_format=form, json_schema="", max_tokens=60) == ""
    both = _refusal(app, output_config={"format": form}, output_format=form)
    assert both.startswith("output_format.schema cannot go with output_config.format.schema")


def test_the_effort_is_a_variable_of_the_template(tmp_path):
    file = tmp_path / "effort.jinja"
    file.write_text("{{ reasoning_effort }}: {{ messages[-1]['content'] }}")
    with App(chat_template=str(file)) as levels:
        for effort, word in (
            ("low", "low"),
            ("medium", "medium"),
            ("high", "high"),
            ("xhigh", "high"),
            ("max", "high"),
        ):
            assert _count(levels, output_config={"effort": effort}) == len(f"{word}: a")
            assert _told(levels, output_config={"effort": effort}) == ""


def test_a_model_that_does_not_think_reports_thinking_as_ignored(tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    with App(chat_template=str(file)) as plain:
        for thinking in ({"type": "enabled"}, {"type": "enabled", "budget_tokens": 3}):
            assert _told(plain, thinking=thinking) == "thinking"
        strict = _ask(plain, 400, {"x-tureen-strict": "1"}, thinking={"type": "enabled"}).json()["error"]["message"]
        assert strict.endswith("this model does not think before it answers")
        for harmless in ({"type": "adaptive"}, {"type": "disabled"}, None):
            assert _told(plain, thinking=harmless) == ""


def test_examples_of_inputs_are_read_by_the_model(app: App):
    examples = [{"city": "Köln"}, {"city": "Bonn"}]
    lines = 'The weather in a city.\nExamples of its input:\n{"city":"Köln"}\n{"city":"Bonn"}'
    written = _count(app, tools=[WEATHER | {"description": lines}])
    assert _count(app, tools=[WEATHER | {"input_examples": examples}]) == written > _count(app, tools=[WEATHER])


CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
TALKS: dict[str, list[dict[str, Any]]] = {
    "short": _user("say:héllo"),
    "blocks": _user(_text("one"), _text("two", **CACHED)),
    "turns": [*_user("a"), {"role": "assistant", "content": "b"}, *_user("c"), *_user("d")],
    "begun": [*_user("a"), {"role": "assistant", "content": "and so"}],
    "called": [
        *_user("a"),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, _text("x"), CALL]},
        *_user({"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [_text("no")]}, _text("so")),
    ],
    "shown": [],
    "shown in a result": [],
}
SYSTEMS = (None, "be", [_text("be"), _text("good", **CACHED)])
TOOLS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": [WEATHER, TIME]},
    {
        "tools": [SEARCH, WEATHER | {"strict": True, "input_examples": [{"city": "Bonn"}]}],
        "tool_choice": {"type": "any"},
    },
    {"tools": [WEATHER, TIME], "tool_choice": {"type": "none"}},
    {"tools": [WEATHER, TIME], "tool_choice": {"type": "tool", "name": "time", "disable_parallel_tool_use": True}},
)
THINKING: tuple[Any, ...] = (
    None,
    {"type": "disabled"},
    {"type": "enabled", "budget_tokens": 1024},
    {"type": "adaptive"},
)


def combined(systems: tuple[Any, ...], thoughts: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return combinations of system, tools and thinking: all in the ledgers, every pair of values in the gate."""
    pairs = itertools.product(enumerate(TOOLS), enumerate(thoughts))
    sampled = [(systems[(at + of) % len(systems)], tools, thinking) for (at, tools), (of, thinking) in pairs]
    return either(list(itertools.product(systems, TOOLS, thoughts)), sampled)


@pytest.mark.sampled
@pytest.mark.parametrize("talk", TALKS)
def test_the_count_of_a_prompt_is_that_of_the_message_made_of_it(app: App, picture, talk):
    messages = {
        "shown": _user(picture, _text("look"), picture),
        "shown in a result": [
            *TALKS["called"][:2],
            *_user({"type": "tool_result", "tool_use_id": "t1", "content": [_text("see"), picture]}),
        ],
    }.get(talk, TALKS[talk])
    systems, thoughts = (SYSTEMS[:1], THINKING[:2]) if talk.startswith("shown") else (SYSTEMS, THINKING)
    counts = set()
    for system, tools, thinking in combined(systems, thoughts):
        body = {"messages": messages, "system": system, "thinking": thinking, **tools}
        usage = _ask(app, max_tokens=1025, stop_regex=".", **body).json()["usage"]
        taken = sum(usage[f"{kind}_tokens"] for kind in ("input", "cache_creation_input", "cache_read_input"))
        assert _count(app, **body) == taken, body
        counts.add(taken)
    assert len(counts) > either(len(systems) * len(thoughts), len(thoughts))  # the bodies make different prompts
