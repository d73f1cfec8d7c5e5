"""What the APIs of chats have in common: bounds of conversations, what a continued message is, whose marks count."""

from __future__ import annotations

import sys

import msgspec
import pytest
from app_under_test import App

from tureen.dialects.ollama.body import OllamaMessage
from tureen.dialects.ollama.conversation import OllamaConversation
from tureen.dialects.openai.responses_body import parse
from tureen.dialects.openai.responses_input import conversation_of
from tureen.text.chat_fallback import Abilities, adapted
from tureen.text.messages import MAX_MESSAGES

PLAIN = "{% for message in messages %}{{ message.role + ':' + message.content + ';' }}{% endfor %}"
CHATS = {
    "/v1/chat/completions": ("messages", {}),
    "/v1/messages": ("messages", {"model": "fake-model", "max_tokens": 5}),
    "/v1/messages/count_tokens": ("messages", {"model": "fake-model"}),
    "/v1/responses": ("input", {}),
    "/api/chat": ("messages", {"model": "fake-model"}),
    "/tokenize": ("messages", {}),
}
"""The field of the messages, and what else the API demands."""


def _make_app(tmp_path, source, **settings):
    file = tmp_path / "own.jinja"
    file.write_text(source)
    return App(chat_template=str(file), **settings)


def _num_steps(work) -> int:
    """Of Python's machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("path", CHATS)
def test_a_chat_has_a_bounded_number_of_messages(tmp_path, path):
    field, more = CHATS[path]
    with _make_app(tmp_path, PLAIN) as app:
        response = app.post(path, **more, **{field: [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)})
        assert response.status_code == 400, response.text
        assert field in response.text
        assert str(MAX_MESSAGES) in response.text


@pytest.mark.parametrize(
    "says", [{}, {"tool_name": "f"}, {"tool_call_id": "zzz"}, {"tool_call_id": "a", "tool_name": "g"}]
)
def test_finding_the_calls_of_results_grows_with_their_number_and_not_with_its_square(says):
    def work(number):
        calls = [{"id": "a", "function": {"name": "f"}}] * number
        given = [{"role": "assistant", "tool_calls": calls}] + [{"role": "tool", "content": "x", **says}] * number
        messages = [msgspec.convert(one, OllamaMessage) for one in given]
        talk = OllamaConversation()

        def add():
            for message in messages:
                talk.add(message, "")

        return _num_steps(add)

    assert work(400) < 4.5 * work(100)


def test_texts_in_a_row_are_joined_once():
    class Text(str):
        def __add__(self, other):
            pytest.fail("texts were joined one by one")

        __radd__ = __iadd__ = __add__

    items = [{"role": role, "content": text} for role, text in zip("ssaaua", "abcdef", strict=True)]
    names = {"s": "system", "a": "assistant", "u": "user"}
    given = [msgspec.structs.replace(one, content=Text(one.content)) for one in parse(
        {"input": [item | {"role": names[item["role"]]} for item in items]}
    ).input]  # fmt: skip
    assert [(one["role"], one["content"]) for one in conversation_of(given, Text("z")).messages] == [
        ("system", "z\n\na\n\nb"), ("assistant", "cd"), ("user", "e"), ("assistant", "f"),
    ]  # fmt: skip
    results = [{"role": "tool", "content": Text(name)} for name in "ab"]
    [one] = adapted(results, [], Abilities(tools=False), {}, "messages")
    assert one["content"] == "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"


@pytest.mark.parametrize("kind", [[], {}, 5, "other"])
def test_a_choice_of_tool_of_no_known_type_is_refused_by_name(tmp_path, kind):
    tools = [{"type": "function", "name": "f"}]
    with _make_app(tmp_path, PLAIN) as app:
        response = app.post("/v1/responses", input="a", tools=tools, tool_choice={"type": kind})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice.type")


TURNS = "{# <think> #}{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("parser", "said", "begun", "thinks"),
    [
        ("auto", "x", "<think>I", True),
        ("auto", "x", "<think>I</think>so", False),
        ("auto", "x", "so", False),
        ("auto", "<think>", "", False),
        ("auto", "<think>", "so", False),
        ("auto", "</think>", "<think>I", True),
        ("deepseek-r1", "x", "<think>I</think>so", False),
        ("deepseek-r1", "x", "I</think>so", False),
        ("deepseek-r1", "</think>", "I", True),
        ("deepseek-r1", "</think>", "", True),
    ],
)
def test_the_words_that_are_continued_say_whether_they_are_a_thought(tmp_path, parser, said, begun, thinks):
    with _make_app(tmp_path, TURNS, reasoning_parser=parser) as app:
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": begun}]
        answer = app.post("/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=5).json()
        message = answer["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) == thinks, message
        assert bool(message["content"]) != thinks
        body = {"model": "fake-model", "max_tokens": 5, "messages": messages}
        assert (app.post("/v1/messages", **body).json()["content"][0]["type"] == "thinking") == thinks


def test_a_message_with_calls_is_not_gone_on_with_unasked(tmp_path):
    with _make_app(tmp_path, PLAIN) as app:
        call = {"function": {"name": "f", "arguments": {}}}
        for last in ({"role": "assistant", "content": "a", "tool_calls": [call]}, {"role": "tool", "content": "a"}):
            messages = [{"role": "user", "content": "x"}, last]
            body = {"model": "fake-model", "messages": messages, "stream": False, "options": {"num_predict": 3}}
            response = app.post("/api/chat", **body)
            assert response.status_code == 200, response.text


def test_special_tokens_that_mark_calls_or_thoughts_cannot_be_hidden(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]
    with _make_app(tmp_path, TURNS, reasoning_parser="mistral", tool_call_parser="mistral") as app:
        for more in ({"tools": tools}, {"tools": tools, "separate_reasoning": False}, {}):
            body = {"messages": messages, "max_tokens": 3, "skip_special_tokens": True} | more
            response = app.post("/v1/chat/completions", **body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "skip_special_tokens")
            assert app.post("/v1/chat/completions", **body | {"skip_special_tokens": False}).status_code == 200
    with _make_app(tmp_path, TURNS, tool_call_parser="hermes") as app:
        body = {"messages": messages, "max_tokens": 3, "skip_special_tokens": True, "tools": tools}
        assert app.post("/v1/chat/completions", **body).status_code == 200


def test_an_id_that_cannot_be_is_refused_by_the_name_it_was_sent_by(tmp_path):
    with _make_app(tmp_path, PLAIN) as app:
        for name in ("rid", "request_id"):
            response = app.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **{name: "a\nb"})
            assert response.json()["error"]["param"] == name
            assert response.json()["error"]["message"].startswith(f"{name} must be")
