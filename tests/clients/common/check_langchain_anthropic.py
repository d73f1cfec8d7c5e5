"""LangChain's chat model for Anthropic's API."""

from __future__ import annotations

import anthropic
import pytest
from langchain_anthropic import ChatAnthropic
from questions import CAPITAL, DESCRIBE, LONG, WEATHER, Person, get_weather

CLIENT = "LangChain for Anthropic (Python)"
PACKAGES = ("langchain-anthropic",)


@pytest.fixture
def chat(url):
    return ChatAnthropic(model="default", base_url=url, temperature=0, max_tokens=200, max_retries=0)


def test_a_chat_whole_and_streamed(chat):
    whole = chat.invoke(CAPITAL)
    assert "Paris" in whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(CAPITAL)) == whole.text


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_demanded_tool_is_called(chat, choice):
    answer = chat.bind_tools([get_weather], tool_choice=choice).invoke(WEATHER)
    assert {(call["name"], *call["args"]) for call in answer.tool_calls} == {("get_weather", "city")}


def test_an_offered_tool_may_be_called(chat):
    answer = chat.bind_tools([get_weather], strict=True).invoke(WEATHER)
    assert answer.tool_calls or answer.text


def test_structured_output(chat):
    assert isinstance(chat.with_structured_output(Person).invoke(DESCRIBE), Person)


def test_an_error_names_the_field(url):
    chat = ChatAnthropic(model="default", base_url=url, max_tokens=8, max_retries=0, temperature=7)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        chat.invoke(CAPITAL)


def test_a_stream_that_is_left_is_aborted(chat, aborted):
    with aborted():
        stream = chat.stream(LONG, max_tokens=4000)
        next(stream)
        stream.close()
