"""What a client may call the model: any name where there is one, and that is told; else a name that is there."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from app_under_test import App

from tureen.requests.model_field import ModelNames

CHAT = [{"role": "user", "content": "say:a"}]
ROUTES = {
    "/v1/completions": {"prompt": "say:a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "say:a", "max_output_tokens": 4},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/api/chat": {"messages": CHAT, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "say:a", "stream": False, "options": {"num_predict": 4}},
    "/api/show": {},
    "/generate": {"text": "say:a"},
    "/generate (MindIE)": {"prompt": "say:a", "max_tokens": 4},
    "/generate (TGI)": {"inputs": "say:a", "parameters": {"max_new_tokens": 4}},
    "/encode": {"text": "a"},
}
"""Each route whose body may name a model, with the shortest body."""

FACTS = {"model_name": "Smol-2", "model_path": "/models/Smol-2.gguf"}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(chat_template="chatml", facts=FACTS) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[App]:
    with App(chat_template="chatml", facts=FACTS, strict_model_names=True) as running:
        yield running


@pytest.fixture(scope="module")
def adapted() -> Iterator[App]:
    with App(chat_template="chatml", facts=FACTS) as running:
        running.state.adapters = {"whisper": "/adapters/whisper"}
        yield running


def _ask(app: App, route: str, model: object):
    return app.post(route.partition(" ")[0], **ROUTES[route], model=model)


@pytest.mark.parametrize("route", ROUTES)
def test_one_model_answers_to_any_name_and_tells_it(app, route):
    answer = _ask(app, route, "gpt-5")
    assert (answer.status_code, answer.headers["x-tureen-ignored"]) == (200, "model")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "name",
    [
        "Smol-2",
        "smol-2",
        "SomeOrg/smol-2",
        "default",
        "tgi",
        "dummy",
        "/models/Smol-2.gguf",
        "./elsewhere/Smol-2.gguf",
        "Smol-2:latest",
        "smol-2:135m",
        "org/smol-2:latest",
    ],
)
def test_a_name_that_means_the_model_is_not_told(app, route, name):
    answer = _ask(app, route, name)
    assert answer.status_code == 200, answer.text
    assert "x-tureen-ignored" not in answer.headers


@pytest.mark.parametrize("route", ROUTES)
def test_with_strict_model_names_a_model_that_is_not_there_is_not_found(strict, route):
    for name in ("gpt-5", "Smol-2:135m", "smol", ":latest"):
        answer = _ask(strict, route, name)
        assert answer.status_code == 404, answer.text
        assert "this server has Smol-2" in json.dumps(answer.json())
    for name in ("SomeOrg/smol-2", "default", "smol-2:latest"):
        assert _ask(strict, route, name).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_with_adapters_a_model_that_is_not_there_is_not_found(adapted, route):
    for name in ("gpt-5", "whisper2", "Smol-2:whisper2", "other:whisper"):
        answer = _ask(adapted, route, name)
        assert answer.status_code == 404, answer.text
        assert "this server has Smol-2, whisper" in json.dumps(answer.json())
    assert _ask(adapted, route, "org/smol-2:latest").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_wants_errors_gets_one_for_a_model_that_is_not_there(app, route):
    answer = app.request(
        "POST", route.partition(" ")[0], json=ROUTES[route] | {"model": "gpt-5"}, headers={"x-tureen-strict": "1"}
    )
    assert answer.status_code in (400, 422)
    assert "model" in json.dumps(answer.json())


def test_a_model_is_found_by_any_of_its_names(app):
    for name in ("Smol-2", "smol-2", "org/smol-2", "default"):
        assert app.request("GET", f"/v1/models/{name}").json()["id"] == "Smol-2"
    assert app.request("GET", "/v1/models/gpt-5").status_code == 404


def test_a_name_without_the_format_of_the_weights_means_the_model():
    """The name of the model on the hub, where a GGUF file is served. Another format is another name."""
    for served in ("Smol-2.Q4_1", "smol-2-q4_k_m", "Smol-2-IQ4_XS", "smol-2-f16", "Smol-2.BF16"):
        names = ModelNames(served, (), {})
        assert names.is_served("SomeOrg/Smol-2")
        assert names.is_served(served.upper())
        assert not names.is_served("Smol-2-Q8_0")
        assert not names.is_served("Smol")
    names = ModelNames("org/Smol-2:Q4_K_M", (), {}, files=("Smol2-Instruct.Q4_1.gguf",))
    for name in (
        "org/smol-2",
        "Smol-2:q4_k_m",
        "SomeOrg/Smol2-Instruct",
        "Smol2-Instruct.Q4_1",
        "smol2-instruct.q4_1.gguf",
    ):
        assert names.is_served(name)
    assert not names.is_served("Smol2-Instruct.Q8_0")
    assert not ModelNames("qwen-q2b", (), {}).is_served("qwe")
    assert not ModelNames("Smol-2", (), {}).is_served("Smol")


def test_generate_takes_the_null_that_sglang_s_router_adds(app):
    answer = app.post(text="say:a", model=None)
    assert (answer.status_code, answer.json()["text"]) == (200, "a")
    assert "x-tureen-ignored" not in answer.headers


def test_generate_tells_a_name_in_its_facts(app):
    assert app.post(text="say:a", model="gpt-5").json()["meta_info"]["ignored_fields"] == ["model"]
