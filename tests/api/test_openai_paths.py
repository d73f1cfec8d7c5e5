"""OpenAI's routes with and without `/v1`: a base URL may end in either."""

from __future__ import annotations

import openai
import pytest
from app_under_test import App
from served_app import ServedApp
from timeouts import PATIENCE_S

from tureen.http.dialect import Entry

CHAT = {"messages": [{"role": "user", "content": "say:a"}], "max_tokens": 4}
BODIES = [
    ("/chat/completions", CHAT),
    ("/completions", {"prompt": "say:a"}),
    ("/responses", {"input": "say:a", "max_output_tokens": 4}),
    ("/embeddings", {"input": "a"}),
    ("/tokenize", {"prompt": "say:a"}),
    ("/detokenize", {"tokens": [97]}),
]
OPENAI_FOLDERS = ("chat", "completions", "responses", "embeddings", "tokenize", "detokenize", "models")


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    return str(file)


@pytest.fixture(scope="module")
def app(template):
    with App(chat_template=template) as running:
        yield running


def told(answer: dict) -> dict:
    """What of an answer does not differ each time."""
    return {name: value for name, value in answer.items() if name in ("object", "choices", "tokens", "text", "data")}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_path_answers_the_same_with_and_without_its_version(app: App, path, body):
    body = body | ({"seed": 1} if "tokenize" not in path and path != "/embeddings" else {})
    versioned, plain = app.post(f"/v1{path}", **body), app.post(path, **body)
    assert versioned.status_code == plain.status_code == 200, plain.text
    assert told(versioned.json()) == told(plain.json())


def test_models_are_listed_at_both(app: App):
    for path in ("/models", "/models/fake-model"):
        assert app.request("GET", path).json() == app.request("GET", f"/v1{path}").json()
    assert app.request("GET", "/models/other").status_code == 404


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/metrics/", "/metrics"),
        ("/v1/models/", "/v1/models"),
        ("/models/", "/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/health//?a=%2F&b", "/health?a=%2F&b"),
    ],
)
def test_a_slash_at_the_end_redirects_as_servers_with_fastapi_do(app: App, path, location):
    for method in ("GET",) if "models" in path else ("GET", "POST"):
        answer = app.request(method, path)
        assert (answer.status_code, answer.headers["location"]) == (307, location)


@pytest.mark.parametrize("path", ["/nothing/", "/v1//models", "/nothing//", "/%2Fhealth/", "/api/nothing/"])
def test_other_paths_with_slashes_are_unknown(app: App, path):
    answer = app.request("GET", path)
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_a_redirect_needs_the_key_that_its_goal_needs():
    with App(api_key="k", admin_api_key="a") as locked:
        assert locked.request("GET", "/metrics/").status_code == 307
        assert locked.request("GET", "/v1/models/").status_code == 401
        assert locked.request("POST", "/flush_cache/", headers={"authorization": "Bearer k"}).status_code == 403


def test_every_route_of_the_api_is_at_both_with_the_same_access(app: App):
    routes = {route.path: route for route in app.app.routes if isinstance(route, Entry)}
    versioned = [path for path in routes if path.startswith("/v1/") and path.split("/")[2] in OPENAI_FOLDERS]
    assert len(versioned) >= 8
    for path in versioned:
        plain, route = routes[path.removeprefix("/v1")], routes[path]
        for name in ("access", "methods", "is_limited", "any_model", "render_error", "endpoint"):
            if (path, name) != ("/v1/tokenize", "endpoint"):  # the plain path has llama.cpp's bodies too
                assert getattr(plain, name) == getattr(route, name), (path, name)


def test_a_base_url_without_a_version_works(template):
    with ServedApp(chat_template=template) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
        with client:
            assert client.models.list().data[0].id == "fake-model"
            answer = client.chat.completions.create(model="fake-model", **CHAT)
            assert answer.choices[0].message.content == "a"


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/responses/compact", 404, "does not compact conversations"),
        ("POST", "/responses/compact", 404, "does not compact conversations"),
        ("POST", "/v1/responses/other", 404, "there is no route '/v1/responses/other'"),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/audio/speech", 404, "audio is not supported"),
        ("GET", "/v1/assistants", 404, "use /v1/responses"),
        ("POST", "/nowhere", 404, "there is no route '/nowhere'"),
        ("GET", "/v1/chat/completions", 405, "use POST"),
        ("PUT", "/v1/responses/r", 405, "use DELETE, GET"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(app: App, method, path, status, says):
    response = app.request(method, path)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime"])
def test_a_websocket_is_refused_with_the_status_by_which_codex_goes_on_over_http(app: App, path):
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    response = app.request("GET", path, headers=headers)
    assert response.status_code == 426
    assert "HTTP POST" in response.json()["error"]["message"]


def test_the_tokens_of_a_response_are_counted_as_they_are_charged(template):
    with ServedApp(chat_template=template) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        with client:
            counted = client.responses.input_tokens.count(model="fake-model", input="say:hello")
            assert (counted.object, counted.input_tokens) == ("response.input_tokens", len("say:hello"))
            answer = client.responses.create(model="fake-model", input="say:hello")
            assert answer.usage.input_tokens == counted.input_tokens
            with pytest.raises(openai.BadRequestError, match="tools"):
                client.responses.input_tokens.count(model="fake-model", input="a", tools=[{"type": "function"}])
