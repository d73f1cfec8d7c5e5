"""Haystack's generators for OpenAI's API."""

from __future__ import annotations

import openai
import pytest
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "Haystack"
PACKAGES = ("haystack-ai",)

TOOL = create_tool_from_function(get_weather)


@pytest.fixture
def generator(url):
    return OpenAIChatGenerator(
        Secret.from_token("none"),
        "default",
        api_base_url=f"{url}/v1",
        generation_kwargs={"temperature": 0, "max_tokens": 200},
        max_retries=0,
    )


def test_a_chat_whole_and_streamed(generator):
    asked = [ChatMessage.from_user(CAPITAL)]
    whole = generator.run(asked)["replies"][0]
    assert "Paris" in whole.text
    chunks = []
    streamed = generator.run(asked, streaming_callback=chunks.append)["replies"][0]
    assert streamed.text == whole.text == "".join(chunk.content for chunk in chunks)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_tool_is_called(generator, choice):
    asked = {"tools": [TOOL], "generation_kwargs": {"tool_choice": choice, "temperature": 0, "max_tokens": 200}}
    calls = generator.run([ChatMessage.from_user(WEATHER)], **asked)["replies"][0].tool_calls
    assert {(call.tool_name, *call.arguments) for call in calls} == {("get_weather", "city")}


def test_an_offered_strict_tool_may_be_called(generator):
    reply = generator.run([ChatMessage.from_user(WEATHER)], tools=[TOOL], tools_strict=True)["replies"][0]
    assert reply.tool_calls or reply.text


def test_structured_output(generator):
    asked = {"generation_kwargs": {"response_format": Person, "temperature": 0}}
    assert Person.model_validate_json(generator.run([ChatMessage.from_user(DESCRIBE)], **asked)["replies"][0].text)


def test_an_error_names_the_field(generator):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        generator.run([ChatMessage.from_user(CAPITAL)], generation_kwargs={"temperature": -1})
