"""LlamaIndex's model for servers that are like OpenAI's."""

from __future__ import annotations

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from questions import CAPITAL, DESCRIBE, WEATHER, Person, get_weather

CLIENT = "LlamaIndex"
PACKAGES = ("llama-index-llms-openai-like",)
NOTES = (
    "Closing its stream does not close the connection: the server goes on until the answer ends.",
    'Exchange: POST /v1/chat/completions with `"stream": true` gets chunks up to `data: [DONE]` on the '
    "connection, which stays open after the client closed the stream.",
)

TOOL = FunctionTool.from_defaults(get_weather)
ASK = [ChatMessage(role="user", content=CAPITAL)]


@pytest.fixture
def model(url):
    return OpenAILike(
        model="default",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        context_window=2048,
    )


def test_a_chat_whole_and_streamed(model):
    whole = model.chat(ASK).message.content
    assert "Paris" in whole
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(ASK)) == whole


def test_a_completion(model):
    assert "Paris" in model.complete(CAPITAL).text


@pytest.mark.parametrize("is_required", [True, False])
def test_tools(model, is_required):
    answer = model.chat_with_tools([TOOL], user_msg=WEATHER, tool_required=is_required)
    calls = model.get_tool_calls_from_response(answer, error_on_no_tool_call=is_required)
    assert not is_required or {(call.tool_name, *call.tool_kwargs) for call in calls} == {("get_weather", "city")}


def test_structured_output(model):
    assert isinstance(model.as_structured_llm(Person).complete(DESCRIBE).raw, Person)


def test_an_error_names_the_field(model):
    with pytest.raises(openai.BadRequestError, match="top_p"):
        model.chat(ASK, top_p=7)
