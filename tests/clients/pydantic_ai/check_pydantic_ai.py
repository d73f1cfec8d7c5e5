"""Pydantic AI's agents, over OpenAI's chat and Responses and over Anthropic's messages."""

from __future__ import annotations

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "Pydantic AI"
PACKAGES = ("pydantic-ai-slim",)

SETTINGS = {"temperature": 0, "max_tokens": 200}


def openai_chat(url):
    return OpenAIChatModel("default", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def openai_responses(url):
    return OpenAIResponsesModel("default", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def anthropic_messages(url):
    return AnthropicModel("default", provider=AnthropicProvider(base_url=url, api_key="none"))


@pytest.fixture(params=[openai_chat, openai_responses, anthropic_messages], ids=lambda make: make.__name__)
def model(request, url):
    return request.param(url)


def test_an_agent_answers(model):
    assert "Paris" in Agent(model, model_settings=SETTINGS).run_sync(CAPITAL).output


def test_an_agent_streams(model):
    with Agent(model, model_settings=SETTINGS).run_stream_sync(CAPITAL) as run:
        assert "Paris" in "".join(run.stream_text(delta=True))


def test_an_agent_with_a_tool_ends(model):
    agent = Agent(model, tools=[get_weather], model_settings=SETTINGS, retries=3)
    assert agent.run_sync(WEATHER).output


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_an_agent_gives_an_object(model, form):
    if form is NativeOutput and isinstance(model, AnthropicModel):
        pytest.skip("it knows by the model's name which of Anthropic's models can do this")
    agent = Agent(model, output_type=form(Person), model_settings=SETTINGS, retries=0)
    assert isinstance(agent.run_sync(DESCRIBE).output, Person)


def test_an_agent_with_a_tool_gives_an_object(model):
    agent = Agent(model, output_type=ToolOutput(Person), tools=[get_weather], model_settings=SETTINGS, retries=3)
    assert isinstance(agent.run_sync(DESCRIBE).output, Person)


def test_an_error_names_the_field(model):
    with pytest.raises(ModelHTTPError, match="top_p"):
        Agent(model, model_settings={"top_p": 7}).run_sync(CAPITAL)
