"""Anthropic's official Python client."""

from __future__ import annotations

import anthropic
import pytest

CLIENT = "Anthropic's SDK (Python)"
PACKAGES = ("anthropic",)

COLD = {"extra_body": {"temperature": 0}}  # no parameter of the client's today, and a field of ours
ASK = [{"role": "user", "content": "What is the capital city of France? Answer in one sentence."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(url):
    with anthropic.Anthropic(base_url=url, max_retries=0, timeout=120) as one:
        yield one


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_a_message(client, model):
    message = client.messages.create(
        model=model, messages=ASK, max_tokens=24, system="You are brief.", metadata={"user_id": "me"}, **COLD
    )
    assert message.role == "assistant"
    assert "Paris" in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0


def test_a_streamed_message_is_the_same(client, model):
    asked = {"model": model, "messages": ASK, "max_tokens": 24, **COLD}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_events_come_in_the_documented_order(client, model):
    types = [event.type for event in client.messages.create(model=model, messages=ASK, max_tokens=8, stream=True)]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client, model):
    message = client.messages.create(model=model, messages=ASK, max_tokens=60, stop_sequences=["Paris"], **COLD)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")


def test_tokens_are_counted(client, model):
    counted = client.messages.count_tokens(model=model, messages=ASK)
    message = client.messages.create(model=model, messages=ASK, max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_tool_is_called_and_its_result_taken(client, model):
    say = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": model, "tools": [WEATHER], "max_tokens": 100, **COLD}
    message = client.messages.create(
        **asked, messages=say, tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    )
    assert message.stop_reason == "tool_use"
    [use] = [block for block in message.content if block.type == "tool_use"]
    assert set(use.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    talk = [*say, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked, messages=talk, tool_choice={"type": "none"}).content


def test_a_streamed_tool_call_has_its_input(client, model):
    say = [{"role": "user", "content": "What is the weather in Paris?"}]
    with client.messages.stream(
        model=model, messages=say, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=100, **COLD
    ) as stream:
        final = stream.get_final_message()
    [use, *_] = [block for block in final.content if block.type == "tool_use"]
    assert (use.name, set(use.input)) == ("get_weather", {"city"})


def test_errors_have_the_client_s_classes(client, model):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=model, messages=ASK, max_tokens=4, extra_body={"temperature": -1})
    with pytest.raises(anthropic.BadRequestError, match="top_kk"):
        client.messages.create(model=model, messages=ASK, max_tokens=4, extra_body={"top_kk": 1})


def test_one_model_answers_to_any_name_and_tells_it(client):
    answer = client.messages.with_raw_response.create(model="nobody", messages=ASK, max_tokens=4)
    assert answer.headers["x-tureen-ignored"] == "model"


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
CACHED = {"cache_control": {"type": "ephemeral"}}


def test_what_agents_send_is_taken_and_told(client, model):
    answer = client.beta.messages.with_raw_response.create(
        model=model,
        messages=ASK,
        max_tokens=24,
        betas=["fine-grained-tool-streaming-2025-05-14", "context-management-2025-06-27"],
        system=[{"type": "text", "text": "You are brief.", **CACHED}],
        tools=[{**WEATHER, "eager_input_streaming": True}, SEARCH],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        **COLD,
    )
    assert answer.parse().content
    told = set(answer.headers["x-tureen-ignored"].split(", "))
    assert {"system[0].cache_control", "tools[0].eager_input_streaming", "tools[1]"} <= told


def test_a_search_is_left_out_and_refused_where_it_is_demanded(client, model):
    asked = {"model": model, "messages": ASK, "max_tokens": 8}
    alone = client.messages.with_raw_response.create(**asked, tools=[SEARCH])
    assert alone.headers["x-tureen-ignored"] == "tools[0]"
    with pytest.raises(anthropic.BadRequestError, match="names a tool"):
        client.messages.create(**asked, tools=[WEATHER, SEARCH], tool_choice={"type": "tool", "name": "web_search"})


def test_tokens_are_counted_with_tools(client, model):
    prompt = {"model": model, "messages": ASK, "tools": [{**WEATHER, "strict": True}, SEARCH], "system": "Be brief."}
    counted = client.messages.count_tokens(**prompt)
    usage = client.messages.create(**prompt, max_tokens=1, tool_choice={"type": "auto"}).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
