"""Ollama's official Python client."""

from __future__ import annotations

import json

import ollama
import pytest

CLIENT = "Ollama's SDK (Python)"
PACKAGES = ("ollama",)

ASK = [{"role": "user", "content": "What is the capital city of France? Answer in one sentence."}]
BRIEF = {"temperature": 0, "num_predict": 24, "seed": 1}


@pytest.fixture
def client(url):
    return ollama.Client(host=url)


@pytest.fixture
def model(client):
    return client.list().models[0].model


def test_the_model_is_listed_and_shown(client, model):
    shown = client.show(model)
    assert "completion" in shown.capabilities
    assert shown.details.family


def test_a_chat_whole_and_streamed(client, model):
    whole = client.chat(model=model, messages=ASK, options=BRIEF)
    assert "Paris" in whole.message.content
    pieces = list(client.chat(model=model, messages=ASK, options=BRIEF, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert pieces[-1].done
    assert pieces[-1].eval_count == whole.eval_count
    assert pieces[-1].done_reason == whole.done_reason


def test_a_prompt_whole_and_streamed(client, model):
    whole = client.generate(model=model, prompt="The capital of France is", raw=True, options=BRIEF)
    assert "Paris" in whole.response
    pieces = list(client.generate(model=model, prompt="The capital of France is", raw=True, options=BRIEF, stream=True))
    assert "".join(piece.response for piece in pieces) == whole.response
    assert client.generate(model=model, prompt="Hello", system="You are brief.", options=BRIEF).response


def test_a_schema_is_kept(client, model):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = client.chat(model=model, messages=ASK, format=schema, options=BRIEF | {"num_predict": 200})
    assert "city" in json.loads(answer.message.content)


def test_errors_have_the_client_s_class(client, model):
    with pytest.raises(ollama.ResponseError, match="num_predictt"):
        client.chat(model=model, messages=ASK, options={"num_predictt": 3})


def test_one_model_answers_to_any_name(client):
    assert client.chat(model="nobody", messages=ASK, options={"num_predict": 4}).done
