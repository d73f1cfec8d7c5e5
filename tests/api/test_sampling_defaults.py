"""Where a sampling parameter that a request leaves out comes from: the operator's flag, then what the model's makers
recommend, then the dialect. Judged by `return_effective` of each dialect that has it, and by what is drawn."""

from __future__ import annotations

import json

import pytest
from app_under_test import App, asked_by

RECOMMENDED = {"temperature": 0.25, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.5}
FACTS = {"generation_defaults": RECOMMENDED}
MESSAGES = [{"role": "user", "content": "abc"}]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

CHATS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 3},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "stream": False, "options": {"num_predict": 3}},
    "/api/generate": {"model": "fake", "prompt": "abc", "stream": False, "options": {"num_predict": 3}},
}
"""Routes that take what the model's makers recommend, and a body for each."""

OF_DIALECT = {"/api/chat": {"temperature": 0.8, "top_k": 40}, "/api/generate": {"temperature": 0.8, "top_k": 40}}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "plain.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def effective(app, route, **further):
    response = app.post(route, **CHATS[route], return_effective=True, **further)
    assert response.status_code == 200, response.text
    answer = response.json()
    return (answer["choices"][0] if "choices" in answer else answer)["effective"]


@pytest.mark.parametrize("route", CHATS)
def test_a_chat_dialect_takes_what_the_model_s_makers_recommend(template, route):
    with App(facts=FACTS, chat_template=template) as app:
        told = effective(app, route)
        assert {name: told[name] for name in RECOMMENDED} == {
            name: {"value": value, "from": "model"} for name, value in RECOMMENDED.items()
        }
        assert told["min_p"] == {"value": 0.0, "from": "default"}


@pytest.mark.parametrize("route", CHATS)
def test_without_a_recommendation_the_dialect_decides(template, route):
    with App(facts={"generation_defaults": {}}, chat_template=template) as app:
        told = effective(app, route)
        expected = PLAIN | OF_DIALECT.get(route, {})
        assert {name: told[name]["value"] for name in ("temperature", "top_k")} == {
            name: expected[name] for name in ("temperature", "top_k")
        }
        assert told["temperature"]["from"] == "default"


@pytest.mark.parametrize("route", CHATS)
def test_an_operator_may_do_without_the_recommendation(template, route):
    with App(facts=FACTS, chat_template=template, sampling_defaults="openai") as app:
        told = effective(app, route)
        assert told["temperature"] == {"value": (PLAIN | OF_DIALECT.get(route, {}))["temperature"], "from": "default"}
        assert told["repetition_penalty"] == {"value": 1.0, "from": "default"}


@pytest.mark.parametrize("route", CHATS)
def test_request_goes_before_flag_before_model_before_dialect(template, route):
    preferred = json.dumps({"top_p": 0.5, "repetition_penalty": 1.25})
    with App(facts=FACTS, chat_template=template, preferred_sampling_params=preferred) as app:
        sent = {"repeat_penalty" if route.startswith("/api") else "repetition_penalty": 1.75}
        if route.startswith("/api"):
            body = CHATS[route] | {"options": CHATS[route]["options"] | sent, "return_effective": True}
        else:
            body = CHATS[route] | sent | {"return_effective": True}
        answer = app.post(route, **body).json()
        told = (answer["choices"][0] if "choices" in answer else answer)["effective"]
        assert told["repetition_penalty"] == {"value": 1.75, "from": "request"}
        assert told["top_p"] == {"value": 0.5, "from": "server"}
        assert told["temperature"] == {"value": 0.25, "from": "model"}
        assert told["min_p"] == {"value": 0.0, "from": "default"}


def test_generate_keeps_its_documented_defaults():
    with App(facts=FACTS) as app:
        told = app.generate(text="abc", return_effective=True)["meta_info"]["effective"]
        assert {name: told[name] for name in PLAIN} == {
            name: {"value": value, "from": "default"} for name, value in PLAIN.items()
        }


OTHERS = {
    "sglang": ("/generate", {"text": "abc"}),
    "mindie": ("/generate", {"prompt": "abc"}),
    "tgi": ("/generate", {"inputs": "abc", "parameters": {"do_sample": True}}),
    "tgi, one path": ("/", {"inputs": "abc", "parameters": {"do_sample": True}}),
    "infer": ("/infer", {"inputs": "abc", "parameters": {"do_sample": True}}),
    "triton": ("/v2/models/fake-model/generate", {"text_input": "abc", "parameters": {"do_sample": True}}),
    "vllm": ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {}}),
    "llama.cpp": ("/completion", {"prompt": "abc", "n_predict": 4}),
}
"""Routes that keep their documented defaults for every model."""


@pytest.mark.parametrize("dialect", OTHERS)
def test_the_dialects_of_generate_sample_as_if_nothing_were_recommended(dialect):
    path, body = OTHERS[dialect]
    sampled = []
    for recommended in ({}, RECOMMENDED | {"min_p": 0.5}):
        with App(facts={"generation_defaults": recommended}) as app:
            sampled.append(asked_by(app, path, **body).params)
    assert sampled[0] == sampled[1]


def test_a_recommended_temperature_of_zero_makes_a_chat_greedy(template):
    with App(facts={"generation_defaults": {"temperature": 0.0}}, chat_template=template) as app:
        body = CHATS["/v1/chat/completions"] | {"max_tokens": 24}
        texts = {app.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"] for _ in range(4)}
        assert len(texts) == 1


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_stream_tells_them_at_its_end(template, route):
    with App(facts=FACTS, chat_template=template) as app:
        body = CHATS[route] | {"stream": True, "return_effective": True}
        text = app.request("POST", route, json=body).text
        assert text.count('"effective"') == 1
        assert '"temperature":{"value":0.25,"from":"model"}' in text


@pytest.mark.parametrize("route", CHATS)
def test_nothing_is_told_where_nobody_asks(template, route):
    with App(facts=FACTS, chat_template=template) as app:
        assert '"effective"' not in app.request("POST", route, json=CHATS[route]).text


def test_ollama_s_show_names_what_acts(template):
    with App(facts=FACTS, chat_template=template) as app:
        shown = app.post("/api/show", model="fake").json()["parameters"].splitlines()
        assert {"temperature 0.25", "top_k 7", "top_p 0.9"} <= set(shown)
