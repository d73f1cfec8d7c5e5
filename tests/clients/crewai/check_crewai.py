"""CrewAI's model and crews."""

from __future__ import annotations

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

import pytest
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "CrewAI"
PACKAGES = ("crewai",)

WEATHER_TOOL = tool("get_weather")(get_weather)


@pytest.fixture
def model(url):
    return LLM(model="openai/default", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=200)


def test_a_call_whole_and_streamed(url, model):
    whole = model.call(CAPITAL)
    assert "Paris" in whole
    streaming = LLM(
        model="openai/default", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=200, stream=True
    )
    assert streaming.call(CAPITAL) == whole


def test_structured_output(url):
    model = LLM(
        model="openai/default",
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=200,
        response_format=Person,
    )
    answer = model.call(DESCRIBE)
    assert isinstance(answer, Person) or Person.model_validate_json(answer)


def test_a_crew_with_a_tool_ends(model):
    agent = Agent(
        role="Reporter", goal="Say the weather", backstory="You are brief.", llm=model, tools=[WEATHER_TOOL], max_iter=2
    )
    task = Task(description=WEATHER, expected_output="one sentence", agent=agent)
    assert Crew(agents=[agent], tasks=[task]).kickoff().raw


def test_an_error_names_the_field(url):
    model = LLM(model="openai/default", base_url=f"{url}/v1", api_key="none", top_p=7)
    with pytest.raises(Exception, match="top_p"):
        model.call(CAPITAL)
