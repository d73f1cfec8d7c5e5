"""Anthropic's `/v1/messages`: its own client reads the answers, its own models say whether they are right."""

from __future__ import annotations

import asyncio
import json

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount
from app_under_test import App
from fake_engine import CONTEXT_LEN
from served_app import ServedApp
from timeouts import PATIENCE_S, until

from tureen.dialects.anthropic.body import TABLE, AnthropicBody, parse
from tureen.dialects.anthropic.conversation import conversation_of
from tureen.requests.chat_prompt import chat_prompt

PATH = "/v1/messages"
CONSTRAINT_NOTES = ("unenforced", "valid", "closed_early")
"""What this server's answers say more than Anthropic's."""

TEMPLATE = (
    "{# <tool_call> <think> #}{% if enable_thinking is defined %}{{ 'yes' if enable_thinking else 'no' }}"
    "{% endif %}{{ '' if tools }}{{ messages[-1]['content'] }}"
)
"""The model is sent what was said last, and answers as fake_engine.py says. It knows tools and can be told to think."""

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
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
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def app(template):
    with App(chat_template=template) as running:
        yield running


@pytest.fixture(scope="module")
def server(template):
    with ServedApp(chat_template=template) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with _make_client(server) as found:
        yield found


def _make_client(server: ServedApp, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=PATIENCE_S)


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def ask(app: App, said="say:hi", status: int = 200, **body):
    body = {"model": "fake-model", "max_tokens": 200, "messages": user(said)} | body
    response = app.post(PATH, **body)
    assert response.status_code == status, response.text
    answer = response.json()
    if status == 200:
        plain = {name: value for name, value in answer.items() if name not in CONSTRAINT_NOTES}
        Message.model_validate(plain, strict=True, extra="forbid")
    else:
        assert answer["type"] == "error"
    return answer


def refusal(app: App, status: int = 400, **body) -> str:
    answer = ask(app, status=status, **body)
    assert answer["error"]["type"] == "invalid_request_error"
    return answer["error"]["message"]


def events(app: App, said="say:hi", **body) -> list[dict]:
    body = {"model": "fake-model", "max_tokens": 200, "messages": user(said), "stream": True} | body
    response = app.post(PATH, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def blocks_without_ids(content: list[dict]) -> list[dict]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


def test_the_shortest_request(app: App):
    answer = ask(app, "say:hello")
    assert answer["content"] == [{"type": "text", "text": "hello"}]
    assert (answer["role"], answer["model"]) == ("assistant", "fake-model")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] == len("hello") + 1
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == len("say:hello")
    assert answer["id"] != ask(app, "say:hello")["id"]


def test_tokens_found_in_the_cache_are_counted_apart(app: App):
    said = "say:" + "x" * 100
    ask(app, said)
    usage = ask(app, said)["usage"]
    assert usage["cache_read_input_tokens"] >= 96
    assert usage["cache_read_input_tokens"] + usage["input_tokens"] == len(said)


@pytest.mark.parametrize(
    ("said", "fields", "text", "reason", "sequence"),
    [
        ("say:one two", {"stop_sequences": [" t", "zz"]}, "one", "stop_sequence", " t"),
        ("say:one two", {"max_tokens": 3}, "one", "max_tokens", None),
        ("say:one", {}, "one", "end_turn", None),
    ],
)
def test_why_a_message_ended(app: App, said, fields, text, reason, sequence):
    answer = ask(app, said, **fields)
    assert answer["content"] == [{"type": "text", "text": text}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    delta = events(app, said, **fields)[-2]
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_context_smaller_than_max_tokens_ends_the_message_and_says_so(app: App):
    said = "x" * (CONTEXT_LEN - 10)
    answer = ask(app, said, max_tokens=100)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 10
    assert refusal(app, said=said, max_tokens=100, min_new_tokens=50).startswith("min_new_tokens")
    message = refusal(app, said="x" * (CONTEXT_LEN + 1))
    assert message.startswith(f"prompt is too long: {CONTEXT_LEN + 1} tokens > {CONTEXT_LEN} maximum")  # agents read it


STREAMED = [
    ("say:héllo wörld", {}),
    ("say:<think>hm, 你好</think>\n\nyes", {}),
    (f"say:let me see {CALL}", {"tools": [WEATHER]}),
    (f"say:{CALL}\n{CALL}", {"tools": [WEATHER]}),
    (f"say:<think>call it</think>{CALL} done", {"tools": [WEATHER]}),
    ("abc", {"max_tokens": 30}),
    ("say:" + CALL, {"tools": [WEATHER], "max_tokens": 66}),
    ("say: ", {}),
    ("say:", {}),
]


@pytest.mark.parametrize(("said", "fields"), STREAMED)
def test_the_client_joins_a_stream_to_the_whole_message(app: App, client, said, fields):
    fields, greedy = {"max_tokens": 200} | fields, {"temperature": 0}
    whole = ask(app, said, **fields, **greedy)
    with client.messages.stream(model="fake-model", messages=user(said), **fields, extra_body=greedy) as stream:
        joined = stream.get_final_message().model_dump(exclude_unset=True)
    for block in joined["content"]:
        block.pop("parsed_output", None)
    assert blocks_without_ids(joined["content"]) == blocks_without_ids(whole["content"])
    for name in ("stop_reason", "stop_sequence", "role", "type", "model"):
        assert joined[name] == whole[name]
    assert joined["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_order_of_events(app: App):
    found = events(app, f"say:<think>a</think>b{CALL}", tools=[WEATHER])
    shown = [(one["type"], one.get("index")) for one in found if one["type"] != "content_block_delta"]
    per_block = [(kind, index) for index in range(3) for kind in ("content_block_start", "content_block_stop")]
    assert shown == [("message_start", None), *per_block, ("message_delta", None), ("message_stop", None)]
    assert [one["content_block"]["type"] for one in found if one["type"] == "content_block_start"] == [
        "thinking",
        "text",
        "tool_use",
    ]
    deltas = {(one["index"], one["delta"]["type"]) for one in found if one["type"] == "content_block_delta"}
    assert deltas == {(0, "thinking_delta"), (1, "text_delta"), (2, "input_json_delta")}
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["input_tokens"] > 0


def test_calls_of_tools_have_their_input_parsed(app: App):
    answer = ask(app, f"say:{CALL}\n{CALL}", tools=[WEATHER])
    assert answer["stop_reason"] == "tool_use"
    assert [block["input"] for block in answer["content"]] == [{"city": "Köln", "days": [1, 2]}] * 2
    assert len({block["id"] for block in answer["content"]}) == 2


def test_a_call_that_was_cut_short_has_what_was_complete_of_it(app: App):
    [block] = ask(app, f"say:{CALL}", tools=[WEATHER], max_tokens=66)["content"]
    assert block["input"] == {"city": "Köln"}


def test_the_choice_of_tools_is_honoured(app: App):
    other = WEATHER | {"name": "other"}
    for choice, names in (({"type": "any"}, {"weather", "other"}), ({"type": "tool", "name": "other"}, {"other"})):
        answer = ask(app, "abc", tools=[WEATHER, other], tool_choice=choice, max_tokens=400)
        assert {block["name"] for block in answer["content"] if block["type"] == "tool_use"} <= names
        assert answer["content"][0]["type"] == "tool_use"
    none = ask(app, f"say:{CALL}", tools=[WEATHER], tool_choice={"type": "none"})
    assert none["content"] == [{"type": "text", "text": CALL}]
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert len(ask(app, "abc", tools=[WEATHER], tool_choice=one, max_tokens=400)["content"]) == 1


def test_the_format_of_the_output(app: App):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "maxProperties": 1}
    schema["additionalProperties"] = False
    config = {"format": {"type": "json_schema", "schema": schema}}
    [block] = ask(app, "abc", output_config=config)["content"]
    assert json.loads(block["text"]).keys() == {"a"}
    config["format"]["schema"] = {"type": "nonsense"}
    assert "output_config.format.schema" in refusal(app, output_config=config)
    assert "json_schema" in refusal(app, output_config=config, json_schema={"type": "object"})


def test_thinking_is_shown_and_counted(app: App):
    answer = ask(app, "say:<think>hm</think>yes")
    assert answer["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>hm</think>")}
    hidden = ask(app, "say:<think>hm</think>yes", thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}


@pytest.mark.parametrize("opened", ["", "<think>"])
def test_thinking_ends_with_its_budget_and_the_answer_follows(opened, tmp_path):
    """The engine goes on with the letter that comes next by its prompt: it is told that the thoughts have ended."""
    file = tmp_path / "thinking.jinja"
    file.write_text("{# <think> #}{{ '' if enable_thinking }}abc" + opened)
    fields = {"max_tokens": 1200, "thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 0}
    with App(chat_template=str(file)) as thinking:
        answer = ask(thinking, "x", **fields)
        if not opened:
            [block] = answer["content"]
            assert (block["type"], len(block["text"]), answer["stop_reason"]) == ("text", 1200, "max_tokens")
            return
        thought, said = answer["content"]
        assert (thought["type"], len(thought["thinking"])) == ("thinking", 1024)
        assert said["type"] == "text"
        assert len(said["text"]) == 1200 - 1024 - len("\n</think>\n\n")
        assert answer["usage"]["output_tokens"] == 1200
        assert answer["stop_reason"] == "max_tokens"
        found = events(thinking, "x", **fields)
        deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
        assert "".join(one.get("thinking", "") for one in deltas) == thought["thinking"]
        assert "".join(one.get("text", "") for one in deltas) == said["text"]
        regex = ask(thinking, "x", regex="[xy]{3}", **fields)["content"][1]["text"]
        assert (len(regex), set(regex) <= {"x", "y"}) == (3, True)
        narrow = ask(thinking, "x", **fields | {"max_tokens": 1025})
        assert [(len(block.get("thinking", "")), len(block.get("text", ""))) for block in narrow["content"]] == [
            (1024 - len("\n</think>\n\n"), 0),
            (0, 1),
        ]
        assert narrow["stop_reason"] == "max_tokens"
        thinking.check_idle()


def test_pictures_are_loaded_once_where_the_context_is_smaller_than_max_tokens(app: App, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "tureen.requests.chat.chat_prompt", lambda *given, **how: calls.append(1) or chat_prompt(*given, **how)
    )
    assert ask(app, "say:a", max_tokens=10**6)["stop_reason"] == "end_turn"
    assert len(calls) == 1


def test_templates_are_told_whether_to_think(app: App):
    def count(**fields) -> int:
        body = {"model": "fake-model", "messages": user("a")} | fields
        return app.post(f"{PATH}/count_tokens", **body).json()["input_tokens"]

    assert count() == len("a")
    assert count(thinking={"type": "disabled"}) == len("noa")
    assert count(thinking={"type": "enabled", "budget_tokens": 1024}) == len("yesa")
    assert count(thinking={"type": "adaptive"}) == len("a")


def test_a_model_that_does_not_think_answers_a_client_that_asks_it_to(tmp_path):
    """Claude Code asks so of every model whose name it does not know, with a budget of max_tokens - 1."""
    file = tmp_path / "plain.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    with App(chat_template=str(file)) as app:
        for thinking in ({"type": "enabled", "budget_tokens": 199}, {"type": "enabled"}, {"type": "disabled"}):
            assert ask(app, "say:a", thinking=thinking)["content"] == [{"type": "text", "text": "a"}]


def test_tokens_are_counted_as_they_will_be_taken(app: App, client):
    counted = client.messages.count_tokens(model="fake-model", messages=user("say:hello"))
    assert counted == MessageTokensCount(input_tokens=len("say:hello"))
    usage = ask(app, "say:hello")["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted.input_tokens


def test_an_answer_goes_on_from_the_assistant_s_last_words(tmp_path):
    file = tmp_path / "all.jinja"
    file.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with App(chat_template=str(file)) as app:
        messages = [{"role": "user", "content": "say:"}, {"role": "assistant", "content": "héllo"}]
        assert ask(app, messages=messages)["content"] == [{"type": "text", "text": "héllo"}]


def _conversation(*messages, system=None):
    body = {"model": "m", "max_tokens": 1, "messages": list(messages)} | ({"system": system} if system else {})
    parsed = parse(body, AnthropicBody)
    return conversation_of(parsed.messages, parsed.system)


def test_a_conversation_that_began_at_anthropic_s_servers_goes_on():
    """What their tools found is read by the model; what they encrypted is left out."""
    found = {
        "type": "web_search_result",
        "url": "https://a.org",
        "title": "A",
        "encrypted_content": "x",
        "page_age": None,
    }
    text = [{"type": "text", "text": "rain"}]
    result = {"type": "search_result", "source": "b.org", "title": "B", "content": text, "citations": {"enabled": True}}
    payload = {
        "model": "m",
        "max_tokens": 1,
        "messages": [
            *user("Weather?"),
            {
                "role": "assistant",
                "content": [
                    {"type": "compaction", "content": "I look."},
                    {"type": "compaction", "content": None},
                    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found], "caller": {}},
                    {"type": "mcp_tool_use", "id": "s2", "name": "echo", "server_name": "mine", "input": {}},
                    {"type": "mcp_tool_result", "tool_use_id": "s2", "is_error": False, "content": []},
                    {"type": "text", "text": "Sun."},
                ],
            },
            *user([result, {"type": "container_upload", "file_id": "f"}]),
        ],
    }  # fmt: skip
    body = parse(payload, AnthropicBody)
    conversation = conversation_of(body.messages, None)
    calls = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        for name, tool, arguments in (("s1", "web_search", {"query": "q"}), ("s2", "echo", {}))
    ]
    result = '[{"type":"web_search_result","url":"https://a.org","title":"A","page_age":null}]'
    assert conversation.messages == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "s1", "name": "web_search", "content": result},
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        {"role": "tool", "tool_call_id": "s2", "name": "echo", "content": "[]"},
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": "B\nb.org\nrain"},
    ]
    paused = parse(payload | {"messages": [*user("a"), payload["messages"][1] | {
        "content": payload["messages"][1]["content"][2:4]}]}, AnthropicBody)  # fmt: skip
    assert not conversation_of(paused.messages, None).continues_last


def test_a_conversation_becomes_messages_of_a_chat():
    cached = {"cache_control": {"type": "ephemeral"}}
    talk = _conversation(
        {"role": "user", "content": "look"},
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "here", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t2", "content": "noon"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "x"}],
                },
                {"type": "text", "text": "so?"},
            ],
        },
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "good", **cached}],
    )
    calls = [("t1", "weather", {"city": "Köln"}), ("t2", "time", {})]
    assert talk.messages == [
        {"role": "system", "content": "be\ngood"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "here"}],
        },
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for one, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "t2", "name": "time", "content": "noon"},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "Error:\nx"},
        {"role": "user", "content": "so?"},
    ]
    assert talk.pictures == ["data:image/png;base64,aGk="]
    assert not talk.continues_last


@pytest.mark.parametrize(
    "block",
    [
        {"type": "search_result", "title": "", "source": "", "content": []},
        {"type": "document", "source": {"type": "content", "content": []}},
    ],
)
def test_a_block_without_text_is_an_empty_message(block):
    assert _conversation(*user([block])).messages == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (user([{"type": "film"}]), "messages[0].content[0].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": "a", "textt": 1}]), "did you mean 'text'"),
        (user([{"type": "tool_use", "id": "a", "name": "b", "input": {}}]), "messages[0].content[0]"),
        (user([{"type": "tool_result", "tool_use_id": "nope"}]), "messages[0].content[0].tool_use_id"),
        (user([{"type": "image", "source": {"type": "file", "file_id": "x"}}]), "messages[0].content[0].source"),
        (user([{"type": "redacted_thinking", "data": "x"}]), "messages[0].content[0]: a message of role user"),
        ([{"role": "assistant", "content": [{"type": "redacted_thinking"}]}], "messages[0].content[0].data"),
        ([{"role": "assistant", "content": [PICTURE]}], "messages[0].content[0]"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([], "messages"),
        (
            [*user("a"), {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}],
            "tool_use",
        ),
    ],
)
def test_messages_of_a_wrong_form_are_refused_by_name(app: App, messages, named):
    assert named in refusal(app, messages=messages)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": None}, "model is missing"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"metadata": {"user": "x"}}, "metadata"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}, "max_tokens": 1025}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "text_editor_20250728", "name": "edit"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"output_config": {"effort": "hihg"}}, "output_config.effort"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed"),
        ({"temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_fields_out_of_bounds_are_refused_by_name(app: App, fields, named):
    assert named in refusal(app, **fields)


@pytest.mark.parametrize("name", TABLE.refused)
def test_what_is_not_offered_is_refused_by_name_unless_it_asks_for_nothing(app: App, name):
    message = refusal(app, **{name: "something"})
    assert message.startswith(f"{name} is not available: ")
    assert ask(app, "say:a", **{name: TABLE.refused[name][0]})["content"] == [{"type": "text", "text": "a"}]


def test_null_is_the_default_of_every_field_that_has_one(app: App):
    required = ("model", "messages", "max_tokens")
    nulls = {name: None for name in AnthropicBody.__struct_fields__ if name not in required}
    assert ask(app, "say:a", **nulls)["content"] == [{"type": "text", "text": "a"}]


def test_what_asks_for_what_there_is_is_taken(app: App):
    fields = {
        "metadata": {"user_id": "someone"},
        "service_tier": "standard_only",
        "cache_control": {"type": "ephemeral", "ttl": "5m"},
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    }
    assert ask(app, "say:a", **fields)["content"] == [{"type": "text", "text": "a"}]


def test_sampling_parameters_of_other_apis_act(app: App):
    assert ask(app, "say:abc", stop_regex="b+")["stop_sequence"] == "b"
    [block] = ask(app, "abc", regex="[xy]{3}")["content"]
    assert set(block["text"]) <= {"x", "y"}
    first, again = (ask(app, "abc", seed=7, max_tokens=20)["content"] for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": user([{"type": "text", "text": "say:a", "foo": 1}])}, "messages[0].content[0].foo"),
        ({"cache_control": {"type": "ephemeral"}}, "cache_control"),
        (
            {"messages": user([{"type": "text", "text": "say:a", "cache_control": {"type": "ephemeral"}}])},
            "messages[0].content[0].cache_control",
        ),
        ({"system": [{"type": "text", "text": "a", "cache_control": None}], "model": "claude"}, "model"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "object"}, "eager_input_streaming": True}]},
            "tools[0].eager_input_streaming",
        ),
        ({"speed": "fast"}, "speed"),
    ],
)
def test_what_cannot_change_the_answer_is_told(app: App, fields, told):
    body = {"model": "default", "max_tokens": 5, "messages": user("say:a")} | fields
    answer = app.request("POST", "/v1/messages", json=body)
    assert (answer.status_code, answer.headers["x-tureen-ignored"]) == (200, told), answer.text
    streamed = app.request("POST", "/v1/messages", json=body | {"stream": True})
    assert streamed.headers["x-tureen-ignored"] == told


def test_the_client_knows_the_errors(client):
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        client.messages.create(model="fake-model", max_tokens=5, messages=user("a"), extra_body={"temperature": 3})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="fake-model", max_tokens=0, messages=user("a"), stream=True)


def test_clients_read_the_id_of_a_request(app: App, client):
    message = client.messages.create(model="fake-model", max_tokens=5, messages=user("say:a"))
    assert message._request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="fake-model", max_tokens=0, messages=user("a"))
    assert refused.value.body["request_id"] == refused.value.request_id != message._request_id
    response = app.post(PATH, model="fake-model", max_tokens=9, stream=True, messages=user("say:ok\x01a"))
    assert f'"request_id":"{response.headers["request-id"]}"' in response.text  # of the error in the stream


def test_the_client_s_tool_runner_sends_the_whole_conversation_when_threads_are_refused(client):
    @anthropic.beta_tool
    def weather(city: str, days: list[int]) -> str:
        """The weather in a city."""
        return f"say:sunny in {city} for {len(days)} days"

    runner = client.beta.messages.tool_runner(
        model="fake-model", max_tokens=200, messages=user(f"say:{CALL}"), tools=[weather]
    )
    assert runner.until_done().content[0].text == "sunny in Köln for 2 days"
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.beta.messages.create(model="m", max_tokens=5, messages=user("a"), extra_body={"thread": {"type": "x"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.value.body["error"]["details"] == details


def test_the_client_lists_the_models(template):
    with ServedApp(chat_template=template) as server, _make_client(server) as client:
        server.state.adapters = {"whisper": "/adapters/whisper", "shout": "/adapters/shout"}
        names = ["fake-model", "whisper", "shout"]
        models = client.models.list(limit=2)  # the client asks for the second page
        assert [(model.id, model.type, model.max_input_tokens) for model in models] == [
            (name, "model", CONTEXT_LEN) for name in names
        ]
        before = client.models.list(before_id="shout", limit=1)
        assert (before.data[0].id, before.has_more) == ("whisper", True)
        assert client.models.retrieve("whisper").display_name == "whisper"
        for model in models.data:
            type(model).model_validate(model.model_dump(), strict=True, extra="forbid")
        for query, field in (({"limit": 0}, "limit"), ({"after_id": "x"}, "after_id")):
            with pytest.raises(anthropic.BadRequestError, match=field):
                client.models.list(**query)
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("other")
        assert httpx.get(f"{server.url}/v1/models").json()["object"] == "list"  # OpenAI's form, for other clients


def test_errors_of_all_routes_have_anthropic_s_form_for_its_clients(template):
    with App(chat_template=template) as app:
        version = {"anthropic-version": "2023-06-01"}
        for method, path, status, kind in (
            ("GET", "/v1/models/other", 404, "not_found_error"),
            ("GET", "/v1/models?after_id=x", 400, "invalid_request_error"),
            ("POST", "/v1/messages/batches", 404, "not_found_error"),
            ("GET", "/v1/messages", 405, "invalid_request_error"),
        ):
            answer = app.request(method, path, headers=version)
            error = answer.json()
            assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), path
            assert error["request_id"] == answer.headers["request-id"]
            assert "param" in app.request(method, path).json().get("error", {"param"}) or path == "/v1/messages"
        assert "error" in app.request("GET", "/api/none", headers=version).json()  # Ollama's form stays
        assert app.request("POST", "/generate", headers=version, content="{").json().keys() == {"error"}


def test_an_api_key_in_either_header(template):
    with ServedApp(chat_template=template, api_key="sesame") as server:
        with _make_client(server, "sesame") as client:
            assert client.messages.create(model="fake-model", max_tokens=5, messages=user("say:a")).content
        with _make_client(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model="fake-model", max_tokens=5, messages=user("say:a"))
        assert refused.value.body["error"]["type"] == "authentication_error"
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="sesame", api_key=None, max_retries=0)
        with bearer as client:
            assert client.messages.create(model="fake-model", max_tokens=5, messages=user("say:a")).content
        for headers, status in (
            ({"x-api-key": "sesame"}, 200),
            ({"x-api-key": "sesame", "authorization": "Bearer wrong"}, 401),
            ({}, 401),
        ):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_errors_of_the_shell_have_the_api_s_shape(app: App):
    for response, status, kind in (
        (app.request("GET", PATH), 405, "invalid_request_error"),
        (app.request("POST", PATH, content=b"{"), 400, "invalid_request_error"),
        (
            app.request("POST", PATH, content=b"{}", headers={"content-type": "text/plain"}),
            415,
            "invalid_request_error",
        ),
    ):
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_a_server_that_is_shutting_down_is_overloaded(template):
    with App(chat_template=template) as app:
        app.state.lifecycle.is_draining = True
        response = app.post(PATH, model="fake-model", max_tokens=5, messages=user("a"))
        assert response.status_code == 529
        assert response.json()["error"]["type"] == "overloaded_error"
        assert int(response.headers["retry-after"]) > 0


def test_a_fault_is_an_error_before_the_stream_and_an_event_in_it(app: App):
    assert ask(app, "say:\x01a", status=500)["error"]["type"] == "api_error"
    found = events(app, "say:ok\x01a")
    assert found[0]["type"] == "message_start"
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"
    app.check_idle()


def test_an_aborted_message_is_an_error(template):
    with App(chat_template=template, slow=True) as app:

        async def abort() -> None:
            await until(lambda: app.client.stats.total_output_tokens > 3)
            app.state.abort(None)

        async def run() -> httpx.Response:
            body = {"model": "fake-model", "max_tokens": 500, "messages": user("abc")}
            response, _ = await asyncio.gather(app.http.post(PATH, json=body), abort())
            return response

        response = app.run(run())
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "api_error"


def test_a_client_that_leaves_ends_its_request(template):
    body = {"model": "fake-model", "max_tokens": 1500, "messages": user("abc")}
    with ServedApp(chat_template=template, slow=True) as server:
        with httpx.stream("POST", server.url + PATH, json=body | {"stream": True}) as response:
            next(response.iter_bytes())
        server.wait_until(lambda: not server.stats.num_running, "the end of a stream without a reader")
        server.abandon(PATH, body, lambda: server.stats.num_running)
        server.wait_until(lambda: not server.stats.num_running, "the end of a request whose client left")
