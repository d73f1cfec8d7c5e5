"""OpenAI's official Python client."""

from __future__ import annotations

import json
import math

import openai
import pytest

CLIENT = "OpenAI's SDK (Python)"
PACKAGES = ("openai",)

FRANCE = "The capital of France is"
ASK = [{"role": "user", "content": "What is the capital city of France? Answer in one sentence."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", max_retries=0, timeout=120) as one:
        yield one


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_the_model_is_listed_and_found_by_its_name(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_completion(client, model):
    answer = client.completions.create(model=model, prompt=FRANCE, max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_streamed_completion_is_the_same_text_and_tells_the_usage(client, model):
    asked = {"model": model, "prompt": FRANCE, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)


def test_log_probabilities_have_the_offsets_of_their_tokens(client, model):
    answer = client.completions.create(model=model, prompt=FRANCE, max_tokens=5, temperature=0, logprobs=2, echo=True)
    [choice] = answer.choices
    told = choice.logprobs
    assert choice.text.startswith(FRANCE)
    assert told.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in told.token_logprobs[1:])
    assert told.text_offset[0] == 0
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert all(len(top) >= 2 for top in told.top_logprobs[1:])


def test_several_prompts_and_samples_are_choices_in_order(client, model):
    answer = client.completions.create(
        model=model, prompt=["One", "Two"], n=2, max_tokens=3, seed=7, temperature=1, best_of=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(model=model, prompt=["One", "Two"], n=2, max_tokens=3, seed=7, temperature=1)
    assert len(again.choices) == 4


def test_a_stop_ends_the_text_and_is_not_in_it(client, model):
    answer = client.completions.create(model=model, prompt=FRANCE, max_tokens=40, temperature=0, stop=["."])
    assert answer.choices[0].finish_reason == "stop"
    assert "." not in answer.choices[0].text


def test_what_is_not_offered_is_refused_by_name(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=FRANCE, suffix="the end")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=FRANCE, extra_body={"temprature": 1})
    assert "temperature" in caught.value.message
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=FRANCE, temperature=-1, stream=True)


def test_one_model_answers_to_any_name_and_tells_it(client):
    answer = client.completions.create(model="nobody", prompt=FRANCE, max_tokens=4)
    assert answer.model_extra["ignored_fields"] == ["model"]


def test_a_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=ASK, max_completion_tokens=24, temperature=0)
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")


def test_a_streamed_chat_is_the_same_text(client, model):
    asked = {"model": model, "messages": ASK, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])


def test_chat_log_probabilities(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(bytes(one.bytes).decode() for one in content) == answer.choices[0].message.content
    assert all(math.isclose(one.logprob, one.top_logprobs[0].logprob) for one in content)
    assert all(len(one.top_logprobs) == 3 for one in content)


def test_samples_of_a_chat_stream_side_by_side(client, model):
    chunks = client.chat.completions.create(model=model, messages=ASK, max_tokens=6, n=2, seed=3, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_json_objects_and_schemas(client, model):
    asked = {"model": model, "max_tokens": 200, "temperature": 0}
    say = [{"role": "user", "content": "Describe a person as JSON."}]
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(messages=say, response_format=schema, **asked)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
    answer = client.chat.completions.create(messages=say, response_format={"type": "json_object"}, **asked)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_a_pydantic_model_is_parsed(client, model):
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    say = [{"role": "user", "content": "Describe a person as JSON."}]
    answer = client.chat.completions.parse(
        model=model, messages=say, response_format=Person, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_that_must_be_called_is_called(client, model, choice):
    say = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": model, "messages": say, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    answer = client.chat.completions.create(**asked, max_tokens=100, parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    said = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = client.chat.completions.create(model=model, messages=[*say, said, result], tools=[WEATHER], max_tokens=10)
    assert after.choices[0].message.role == "assistant"


def test_a_streamed_tool_call_is_the_same_call(client, model):
    say = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": model, "messages": say, "tools": [WEATHER, TIME], "tool_choice": "required"}
    with client.chat.completions.stream(**asked, temperature=0, max_tokens=100, parallel_tool_calls=False) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked, temperature=0, max_tokens=100, parallel_tool_calls=False)
    [call], [other] = final.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (other.function.name, other.function.arguments)
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"


def test_tools_that_need_not_be_called(client, model):
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=model, messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=8, temperature=0
        )
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_parameters_beyond_openai_s_go_in_the_extra_body(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, extra_body={"regex": "(yes|no)", "top_k": 5, "min_p": 0.1}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    answer = client.completions.create(
        model=model, prompt=FRANCE, extra_body={"structured_outputs": {"choice": ["Rome", "Oslo"]}}
    )
    assert answer.choices[0].text in ("Rome", "Oslo")


def test_a_bias_and_a_seed_are_honoured(client, model):
    biased = client.completions.create(model=model, prompt=FRANCE, max_tokens=4, logit_bias={"30": 100}, temperature=0)
    assert len(set(biased.choices[0].text)) == 1
    same = [
        client.completions.create(model=model, prompt=FRANCE, max_tokens=8, seed=11).choices[0].text for _ in range(2)
    ]
    assert same[0] == same[1]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(client, model, encoding):
    answer = client.embeddings.create(model=model, input=["Paris", "London"], encoding_format=encoding)
    assert [one.index for one in answer.data] == [0, 1]
    if encoding == "float":
        assert math.isclose(sum(value**2 for value in answer.data[0].embedding), 1, rel_tol=1e-3)


def test_a_response_whole_and_streamed(client, model):
    asked = {
        "model": model,
        "input": "What is the capital city of France? Answer in one sentence.",
        "max_output_tokens": 24,
        "temperature": 0,
    }
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text
    with client.responses.stream(**asked) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert types[0] == "response.created"
    assert "response.output_text.delta" in types


def test_a_response_with_tools(client, model):
    tool = {
        "type": "function",
        "name": "get_weather",
        "strict": True,
        **{key: WEATHER["function"][key] for key in ("description", "parameters")},
    }
    answer = client.responses.create(
        model=model,
        input="Weather in Paris?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=100,
        temperature=0,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls[0].name == "get_weather"
    assert "city" in json.loads(calls[0].arguments)


async def _gather(url, model):
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0) as client:
        work = [
            client.chat.completions.create(model=model, messages=ASK, max_tokens=4, temperature=0) for _ in range(8)
        ]
        return await asyncio.gather(*work)


def test_many_at_once(url, model):
    import asyncio

    answers = asyncio.run(_gather(url, model))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
