"""AutoGen's model client for OpenAI's API, and an agent over it."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "AutoGen"
PACKAGES = ("autogen-ext", "autogen-agentchat")

TOOL = FunctionTool(get_weather, description="The weather in a city", strict=True)
KNOWN = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


def say(text):
    return [UserMessage(content=text, source="user")]


@pytest.fixture
def client(url):
    return OpenAIChatCompletionClient(
        model="default",
        base_url=f"{url}/v1",
        api_key="none",
        model_info=KNOWN,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


async def whole_and_streamed(client):
    whole = await client.create(say(CAPITAL))
    parts = [part async for part in client.create_stream(say(CAPITAL))]
    return whole.content, "".join(part for part in parts if isinstance(part, str)), parts[-1].content


def test_a_chat_whole_and_streamed(client):
    whole, pieces, last = asyncio.run(whole_and_streamed(client))
    assert "Paris" in whole
    assert pieces == last == whole


@pytest.mark.parametrize("choice", ["auto", "required", TOOL], ids=["auto", "required", "named"])
def test_tools(client, choice):
    answer = asyncio.run(client.create(say(WEATHER), tools=[TOOL], tool_choice=choice))
    if isinstance(answer.content, str):
        assert choice == "auto"
    else:
        assert {(call.name, *json.loads(call.arguments)) for call in answer.content} == {("get_weather", "city")}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["alone", "beside a strict tool"])
def test_structured_output(client, tools):
    answer = asyncio.run(client.create(say(DESCRIBE), tools=tools, json_output=Person))
    assert not isinstance(answer.content, str) or Person.model_validate_json(answer.content)


def test_an_agent_with_a_tool_ends(client):
    agent = AssistantAgent("assistant", client, tools=[get_weather], reflect_on_tool_use=True)
    assert asyncio.run(agent.run(task=WEATHER)).messages[-1].content


def test_an_error_names_the_field(client):
    with pytest.raises(openai.BadRequestError, match="top_p"):
        asyncio.run(client.create(say(CAPITAL), extra_create_args={"top_p": 7}))
