"""LangChain's chat model for OpenAI's API."""

from __future__ import annotations

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

CLIENT = "LangChain for OpenAI (Python)"
PACKAGES = ("langchain-openai",)

ASK = [HumanMessage("What is the capital city of France? Answer in one sentence.")]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return city


@pytest.fixture
def settings(url):
    return {"base_url": f"{url}/v1", "temperature": 0, "max_retries": 0}


@pytest.fixture
def chat(settings):
    return ChatOpenAI(model="default", max_tokens=100, **settings)


def test_a_chat_whole_streamed_and_in_batches(chat):
    whole = chat.invoke(ASK)
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content
    assert [one.content for one in chat.batch([ASK, ASK])] == [whole.content] * 2


def test_a_tool_is_called(chat):
    answer = chat.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?")
    assert answer.tool_calls[0]["name"] == "get_weather"
    assert set(answer.tool_calls[0]["args"]) == {"city"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat, method):
    if method == "json_mode":
        asked = (
            chat.with_structured_output(None, method=method)
            if False
            else chat.bind(response_format={"type": "json_object"})
        )
        assert asked.invoke("A person as a JSON object with name and age").content.lstrip().startswith("{")
        return
    answer = chat.with_structured_output(Person, method=method).invoke("Describe a person")
    assert isinstance(answer, Person)


def test_a_completion_and_embeddings(settings):
    text = OpenAI(model="default", max_tokens=8, **settings).invoke("The capital of France is")
    assert "Paris" in text
    embeddings = OpenAIEmbeddings(
        model="default", base_url=settings["base_url"], check_embedding_ctx_length=False, max_retries=0
    )
    assert len(embeddings.embed_documents(["one", "two"])) == 2
