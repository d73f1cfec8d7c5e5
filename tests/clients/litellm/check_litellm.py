"""LiteLLM's SDK, by its names of OpenAI-compatible, Anthropic, Ollama and text-completion servers."""

from __future__ import annotations

import json

import litellm
import pytest
from questions import CAPITAL, DESCRIBE, LONG, WEATHER, Person

CLIENT = "LiteLLM's SDK"
PACKAGES = ("litellm",)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
BY_PROVIDER = {
    "openai": ("openai/default", "/v1"),
    "hosted_vllm": ("hosted_vllm/default", "/v1"),
    "anthropic": ("anthropic/claude-default", ""),
    "ollama_chat": ("ollama_chat/default", ""),
}


@pytest.fixture(params=BY_PROVIDER)
def asked(request, url):
    model, path = BY_PROVIDER[request.param]
    return {"model": model, "api_base": url + path, "api_key": "none", "temperature": 0, "max_tokens": 200}


def say(text):
    return [{"role": "user", "content": text}]


def test_a_chat_whole_and_streamed(asked):
    whole = litellm.completion(messages=say(CAPITAL), **asked)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(messages=say(CAPITAL), stream=True, **asked)
    ]
    assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(asked, choice):
    if asked["model"].startswith("ollama") and choice != "auto":
        pytest.skip("Ollama's API has no tool_choice")
    message = litellm.completion(messages=say(WEATHER), tools=TOOLS, tool_choice=choice, **asked).choices[0].message
    calls = {(call.function.name, *json.loads(call.function.arguments)) for call in message.tool_calls or []}
    assert calls == {("get_weather", "city")} or (choice == "auto" and (calls or message.content))


def test_structured_output(asked):
    answer = litellm.completion(messages=say(DESCRIBE), response_format=Person, **asked)
    assert Person.model_validate_json(answer.choices[0].message.content)


def test_an_error_names_the_field(asked):
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=say(CAPITAL), **asked | {"top_p": 7})


def test_a_stream_that_is_left_is_aborted(url, aborted):
    asked = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 4000}
    with aborted():
        stream = litellm.completion(messages=say(LONG), stream=True, **asked)
        next(iter(stream))
        stream.completion_stream.close()


def test_a_response(url):
    answer = litellm.responses(
        model="openai/default", input=CAPITAL, api_base=f"{url}/v1", api_key="none", temperature=0, max_output_tokens=40
    )
    assert "Paris" in answer.output[0].content[0].text


def test_embeddings(url):
    answer = litellm.embedding("openai/default", input=["one", "two"], api_base=f"{url}/v1", api_key="none")
    assert len(answer.data) == 2
