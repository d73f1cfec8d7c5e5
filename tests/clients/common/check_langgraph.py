"""LangGraph's agents, over LangChain's chat models for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "LangGraph's agents (Python)"
PACKAGES = ("langchain", "langgraph")
NOTES = (
    "A form that is given as a call needs parallel_tool_calls: false; a model that calls it twice is an error there.",
    'Exchange: POST /v1/chat/completions with `"tool_choice": "required"` may get `"tool_calls": '
    '[{…"name": "Person"…}, {…"name": "Person"…}]`, which is valid.',
)


@pytest.fixture(params=["openai", "anthropic"])
def chat(request, url):
    settings = {"model": "default", "temperature": 0, "max_tokens": 200, "max_retries": 0}
    if request.param == "openai":
        return ChatOpenAI(base_url=f"{url}/v1", **settings)
    return ChatAnthropic(base_url=url, **settings)


def asked(text):
    return {"messages": [{"role": "user", "content": text}]}


def test_an_agent_without_tools_answers(chat):
    assert "Paris" in create_agent(chat).invoke(asked(CAPITAL))["messages"][-1].text


def test_an_agent_with_a_tool_ends_with_an_answer(chat):
    messages = create_agent(chat, [get_weather]).invoke(asked(WEATHER), {"recursion_limit": 8})["messages"]
    assert isinstance(messages[-1], AIMessage)
    for message in messages:
        assert not isinstance(message, ToolMessage) or message.content.startswith("It is sunny")


def test_an_agent_streams(chat):
    chunks = list(create_agent(chat).stream(asked(CAPITAL), stream_mode="messages"))
    assert "Paris" in "".join(message.text for message, _ in chunks)


@pytest.mark.parametrize("chat", ["openai"], indirect=True)
def test_an_agent_with_a_tool_and_a_form_gives_the_form_as_a_call(chat):
    chat = chat.model_copy(update={"model_kwargs": {"parallel_tool_calls": False}})
    agent = create_agent(chat, [get_weather], response_format=ToolStrategy(Person, handle_errors=False))
    assert isinstance(agent.invoke(asked(DESCRIBE), {"recursion_limit": 12})["structured_response"], Person)


def test_an_agent_with_a_tool_and_a_form_calls_or_gives_the_form_as_its_answer(url):
    chat = ChatOpenAI(model="default", base_url=f"{url}/v1", temperature=0, max_tokens=200, max_retries=0)
    tool = StructuredTool.from_function(get_weather, return_direct=True)
    state = create_agent(chat, [tool], response_format=ProviderStrategy(Person, strict=True)).invoke(asked(DESCRIBE))
    assert isinstance(state.get("structured_response"), Person) or state["messages"][-1].content.startswith("It is")
