"""OpenAI's Agents SDK, over the Responses API and over chat completions."""

from __future__ import annotations

import agents
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "OpenAI's Agents SDK"
PACKAGES = ("openai-agents",)

agents.set_tracing_disabled(True)
TOOL = function_tool(get_weather)


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel], ids=["responses", "chat"])
def model(request, url):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return request.param("default", openai_client=client)


def an_agent(model, **more):
    settings = (
        ModelSettings(temperature=0, max_tokens=200) if "model_settings" not in more else more.pop("model_settings")
    )
    return Agent(name="assistant", instructions="You are brief.", model=model, model_settings=settings, **more)


def test_an_agent_answers(model):
    assert Runner.run_sync(an_agent(model), CAPITAL).final_output


async def streamed(agent):
    run = Runner.run_streamed(agent, CAPITAL)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return "".join(deltas), run.final_output


def test_an_agent_streams(model):
    import asyncio

    text, final = asyncio.run(streamed(an_agent(model)))
    assert text == final


def test_an_agent_with_a_tool_ends(model):
    agent = an_agent(model, tools=[TOOL], tool_use_behavior="stop_on_first_tool")
    assert Runner.run_sync(agent, WEATHER, max_turns=3).final_output


def test_a_demanded_tool_is_called(model):
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    agent = an_agent(model, tools=[TOOL], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    assert Runner.run_sync(agent, WEATHER, max_turns=3).final_output.startswith("It is sunny in")


def test_an_agent_gives_an_object(model):
    agent = an_agent(model, output_type=Person)
    assert isinstance(Runner.run_sync(agent, DESCRIBE).final_output, Person)


def test_an_agent_gives_an_object_beside_a_tool_that_it_may_not_call(model):
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="none")
    agent = an_agent(model, output_type=Person, tools=[TOOL], model_settings=settings)
    assert isinstance(Runner.run_sync(agent, DESCRIBE).final_output, Person)


def test_an_agent_with_a_tool_and_a_form_calls_or_gives_the_object(model):
    agent = an_agent(model, output_type=Person, tools=[TOOL], tool_use_behavior="stop_on_first_tool")
    final = Runner.run_sync(agent, DESCRIBE).final_output
    assert isinstance(final, Person) or final.startswith("It is sunny in")


def test_an_error_names_the_field(model):
    agent = an_agent(model, model_settings=ModelSettings(top_p=7))
    with pytest.raises(openai.BadRequestError, match="top_p"):
        Runner.run_sync(agent, CAPITAL)
