"""Semantic Kernel's chat service for OpenAI's API."""

from __future__ import annotations

import asyncio

import openai
import pytest
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function

CLIENT = "Semantic Kernel"
PACKAGES = ("semantic-kernel",)


@pytest.fixture
def service(url):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return OpenAIChatCompletion(ai_model_id="default", async_client=client)


@pytest.fixture
def kernel():
    kernel = Kernel()
    kernel.add_function("weather", kernel_function(get_weather, name="get_weather"))
    return kernel


def settings(**more):
    return OpenAIChatPromptExecutionSettings(**{"temperature": 0, "max_tokens": 200} | more)


def said(text):
    history = ChatHistory()
    history.add_user_message(text)
    return history


async def whole_and_streamed(service):
    whole = await service.get_chat_message_content(said(CAPITAL), settings())
    return str(whole), [
        str(part) async for part in service.get_streaming_chat_message_content(said(CAPITAL), settings())
    ]


def test_a_chat_whole_and_streamed(service):
    whole, pieces = asyncio.run(whole_and_streamed(service))
    assert "Paris" in whole
    assert "".join(pieces) == whole


@pytest.mark.parametrize("choice", [FunctionChoiceBehavior.Auto, FunctionChoiceBehavior.Required])
def test_tools_are_called_and_the_chat_ends(service, kernel, choice):
    asked = settings(function_choice_behavior=choice(maximum_auto_invoke_attempts=1))
    assert asyncio.run(service.get_chat_message_content(said(WEATHER), asked, kernel=kernel))


def test_structured_output(service):
    answer = asyncio.run(service.get_chat_message_content(said(DESCRIBE), settings(response_format=Person)))
    assert Person.model_validate_json(str(answer))


def test_an_error_names_the_field(service):
    with pytest.raises(ServiceResponseException, match="top_p"):
        asyncio.run(service.get_chat_message_content(said(CAPITAL), settings(extension_data={"top_p": 0.0})))
