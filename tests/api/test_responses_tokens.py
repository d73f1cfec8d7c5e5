"""Fields about tokens, and about reasoning, in responses: what a chat has for them, a response has too."""

from __future__ import annotations

import json

import pytest
from app_under_test import App, parse_events
from byte_tokenizer import EOS

CHAT, PATH = "/v1/chat/completions", "/v1/responses"
PROMPT = "say:hé"


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text("{# <think> #}{{ messages[-1]['content'] }}")
    with App(chat_template=str(file)) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A model whose thoughts never end by themselves."""
    file = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    file.write_text("{# <think> #}abc<think>")
    with App(chat_template=str(file)) as running:
        yield running


def ask(app: App, said: str = PROMPT, status: int = 200, **fields):
    response = app.post(PATH, **{"input": said, "max_output_tokens": 40, "seed": 1, **fields})
    assert response.status_code == status, response.text
    return response.json()


def last_event(app: App, said: str = PROMPT, **fields):
    body = {"input": said, "max_output_tokens": 40, "seed": 1, "stream": True, **fields}
    last = app.post(PATH, **body).text.rstrip().rpartition("\ndata: ")[2]
    return json.loads(last)["response"]


def chat(app: App, said: str = PROMPT, **fields):
    messages = [{"role": "user", "content": said}]
    answer = app.post(CHAT, **{"messages": messages, "max_tokens": 40, "seed": 1, **fields}).json()
    return answer, answer["choices"][0]


@pytest.mark.parametrize("get", [ask, last_event])
def test_token_ids_are_those_of_prompt_and_output(app: App, get):
    answer = get(app, return_token_ids=True)
    assert answer["prompt_token_ids"] == list(PROMPT.encode())
    assert answer["token_ids"] == [*"hé".encode(), EOS]
    assert get(app, return_prompt_token_ids=True)["prompt_token_ids"] == list(PROMPT.encode())
    assert not {"token_ids", "prompt_token_ids"} & get(app).keys()


def test_what_a_chat_tells_of_tokens_a_response_tells_too(app: App):
    fields = {"prompt_logprobs": 2, "return_hidden_states": True, "return_meta_info": True}
    answer = ask(app, **fields)
    whole, choice = chat(app, **fields)
    assert answer["prompt_logprobs"] == whole["prompt_logprobs"]
    assert answer["hidden_states"] == choice["hidden_states"]
    differing = ("id", "e2e_latency", "first_token_latency", "decode_throughput", "cached_tokens")
    ours, theirs = ({k: v for k, v in one["meta_info"].items() if k not in differing} for one in (answer, choice))
    assert ours == theirs


def test_log_probabilities_name_tokens_by_id_and_have_the_asked_ones(app: App):
    fields = {"top_logprobs": 1, "return_tokens_as_token_ids": True, "logprob_token_ids": [97, 98]}
    part = ask(app, **fields)["output"][-1]["content"][0]
    _, choice = chat(app, logprobs=True, **fields)
    expected = choice["logprobs"]["content"][: len(part["logprobs"])]
    assert part["logprobs"] == expected
    assert part["logprobs"][0]["token"].startswith("token_id:")
    assert {"token_id:97", "token_id:98"} <= {one["token"] for one in part["logprobs"][0]["top_logprobs"]}
    assert ask(app, return_tokens_as_token_ids=True)["ignored_fields"] == ["return_tokens_as_token_ids"]


def test_a_prompt_is_cut_to_its_last_tokens(app: App):
    assert ask(app, "xyz" + PROMPT, truncate_prompt_tokens=len(PROMPT.encode()), return_token_ids=True)[
        "prompt_token_ids"
    ] == list(PROMPT.encode())
    refused = ask(app, status=400, truncate_prompt_tokens=3, truncation="auto")
    assert refused["error"]["param"] == "truncate_prompt_tokens"


def test_an_extra_key_separates_the_prefix_cache(app: App):
    def cached(**more):
        return ask(app, "a prompt of its own" * 4, **more)["usage"]["input_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() > 0
    assert cached(extra_key="mine") == 0


@pytest.mark.parametrize("get", [ask, last_event])
def test_reasoning_is_left_out_of_a_response_where_that_is_asked_for(app: App, get):
    said = "say:<think>well, well</think>yes"
    plain, without = get(app, said), get(app, said, include_reasoning=False)
    assert [item["type"] for item in plain["output"]] == ["reasoning", "message"]
    assert [item["type"] for item in without["output"]] == ["message"]
    assert without["output"][0]["content"] == plain["output"][1]["content"]
    assert without["usage"]["output_tokens_details"] == plain["usage"]["output_tokens_details"]


def test_reasoning_that_is_left_out_still_comes_sealed_where_that_is_asked_for(app: App):
    said = "say:<think>well, well</think>yes"
    sealing = {"include": ["reasoning.encrypted_content"]}
    shown = ask(app, said, **sealing)["output"]
    for get in (ask, last_event):
        reasoning, message = get(app, said, include_reasoning=False, **sealing)["output"]
        assert (reasoning["type"], reasoning["content"], reasoning["summary"]) == ("reasoning", [], [])
        assert reasoning["encrypted_content"] == shown[0]["encrypted_content"]
        assert message["content"] == shown[1]["content"]
    streamed = app.post(PATH, input=said, max_output_tokens=40, stream=True, include_reasoning=False, **sealing).text
    assert "well, well" not in streamed
    assert '"type":"response.reasoning_text' not in streamed


def test_reasoning_is_left_out_of_a_chat_where_that_is_asked_for(app: App):
    said = "say:<think>well, well</think>yes"
    plain, without = chat(app, said)[1]["message"], chat(app, said, include_reasoning=False)[1]["message"]
    assert (plain["reasoning_content"], without["reasoning_content"]) == ("well, well", None)
    assert without["content"] == plain["content"] == "yes"
    body = {"messages": [{"role": "user", "content": said}], "stream": True, "include_reasoning": False}
    deltas = [choice["delta"] for event in parse_events(app.post(CHAT, **body).text) for choice in event["choices"]]
    assert not any(delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes"
    refused = app.post(CHAT, **{**body, "stream": False, "separate_reasoning": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include_reasoning")


@pytest.mark.parametrize("get", [ask, last_event])
def test_a_thinking_budget_holds_in_a_response(thinking: App, get):
    answer = get(thinking, thinking_token_budget=5)
    reasoning, message = answer["output"]
    assert len(reasoning["content"][0]["text"]) == 5
    assert message["content"][0]["text"]
    assert answer["usage"]["output_tokens"] == 40
