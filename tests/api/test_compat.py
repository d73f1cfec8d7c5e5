"""`/compat` tells the truth: every field of the original APIs has an answer, and the answer is what the server does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_under_test import App
from kinds_of_servers import Servers, other_servers
from one_request import SHORTEST_WITHOUT_OUTPUT

from tureen.app.compat import compat_routes, rows_of

FIELDS: dict[str, list[str]] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "api_fields.json").read_text(encoding="utf-8")
)
ROUTES = {f"{one.api} {one.route}": one for one in compat_routes()}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
OLLAMA = {"stream": False, "options": {"num_predict": 2}}
TENSOR = {"name": "input0", "shape": [1, 1], "datatype": "UINT32", "data": [97]}
BODIES: dict[str, dict[str, Any]] = {
    "SGLang /generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "MindIE and vLLM's demo server /generate": {"prompt": "a", "max_tokens": 2},
    "TGI /generate": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "OpenAI /v1/completions": {"prompt": "a", "max_tokens": 2},
    "OpenAI /v1/chat/completions": CHAT,
    "OpenAI /v1/responses": {"input": "a", "max_output_tokens": 2},
    "Anthropic /v1/messages": CHAT | {"model": "default"},
    "Anthropic /v1/messages/count_tokens": {"messages": CHAT["messages"], "model": "default"},
    "Ollama /api/chat": {"messages": CHAT["messages"], "model": "default"} | OLLAMA,
    "Ollama /api/generate": {"prompt": "a", "model": "default"} | OLLAMA,
    "Ollama /api/embed": {"input": "a", "model": "default"},
    "Ollama /api/embeddings": {"prompt": "a", "model": "default"},
    "OpenAI /v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},  # and the id of a file
    "MindIE /infer": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "MindIE /v2/models/default/generate": {"text_input": "a", "parameters": {"max_new_tokens": 2}},
    "MindIE /v2/models/default/infer": {"inputs": [TENSOR], "parameters": {"max_new_tokens": 2}},
    "vLLM /inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 2}},
    "llama.cpp /completion": {"prompt": "a", "n_predict": 2},
    "llama.cpp /infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
}
BODIES |= SHORTEST_WITHOUT_OUTPUT
"""For each route the shortest body that is taken."""


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[Servers]:
    with App(chat_template="chatml", batch_path=str(tmp_path_factory.mktemp("batches"))) as running:
        sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}\n", "application/jsonl")}}
        BODIES["OpenAI /v1/batches"]["input_file_id"] = running.request("POST", "/v1/files", **sent).json()["id"]
        with other_servers() as others:
            yield Servers(running, others)


def _make_body(name: str, field: str, value: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(BODIES[name]))
    part, _, own = field.rpartition(".")
    (body.setdefault(part, {}) if part else body)[own] = value
    return body


def _nothing(name: str, field: str) -> Any:
    """The value that asks for nothing, as the table has it."""
    part, _, own = field.rpartition(".")
    [found] = [one.table.refused[own] for one in ROUTES[name].parts if one.name == part and own in one.table.refused]
    return found[0]


def test_each_route_that_has_a_list_is_on_the_page():
    assert set(FIELDS) == set(ROUTES) == set(BODIES)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_original_is_honoured_or_refused_with_a_reason(name):
    told = {row.field: row.note for row in rows_of(ROUTES[name])}
    assert [field for field in FIELDS[name] if field not in told] == []
    assert [field for field, note in told.items() if len(note) < 6] == []


@pytest.mark.parametrize("name", BODIES)
def test_the_shortest_body_is_taken(app, name):
    response = app.request("POST", ROUTES[name].route, json=BODIES[name])
    assert response.status_code == 200, response.text


def _fields(name: str, *standings: str) -> list[str]:
    """Fields of a route's body; those of objects deep inside (`tools[].strict`, `*.file_id`) are left out."""
    rows = [row for row in rows_of(ROUTES[name]) if row.standing in standings]
    return [row.field for row in rows if "*" not in row.field and "[]" not in row.field]


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_said_to_be_refused_is_refused_by_name(app, name):
    for field in _fields(name, "refused"):
        for value in ({"a": 1}, True if _nothing(name, field) is False else 17):
            response = app.request("POST", ROUTES[name].route, json=_make_body(name, field, value))
            assert response.status_code in (400, 422), (field, response.text)
            assert field in response.text


@pytest.mark.parametrize("name", ROUTES)
def test_the_value_that_asks_for_nothing_is_taken(app, name):
    nothing: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    for field in _fields(name, "refused"):
        part, _, own = field.rpartition(".")
        for fields, value in ((nothing, _nothing(name, field)), (nulls, None)):
            (fields.setdefault(part, {}) if part else fields)[own] = value
    for parts in (nothing, nulls):
        body = json.loads(json.dumps(BODIES[name]))
        for own, value in parts.items():
            body[own] = body.get(own, {}) | value if isinstance(value, dict) else value
        response = app.request("POST", ROUTES[name].route, json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_said_to_be_honoured_is_known_and_checked(app, name):
    """A value that no field takes is refused for what it is, not because nobody knows the field."""
    for field in _fields(name, "honoured", "differs"):
        response = app.request("POST", ROUTES[name].route, json=_make_body(name, field, [[{"never": [0.5]}]]))
        assert response.status_code in (400, 422), (field, response.text)
        assert "unknown field" not in response.text, field
        assert field.rpartition(".")[2] in response.text, field


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_said_to_be_told_is_accepted_and_told_and_null_is_not_sent(app, name):
    for field in _fields(name, "reported"):
        for value, ignored in ((17, field), (None, None)):
            response = app.request("POST", ROUTES[name].route, json=_make_body(name, field, value))
            assert (response.status_code, response.headers.get("x-tureen-ignored")) == (200, ignored), response.text


@pytest.mark.parametrize("name", ROUTES)
def test_what_becomes_of_a_field_on_no_list_is_as_the_page_says(app, name):
    [others] = [
        one["other_fields"]
        for one in app.request("GET", "/compat.json").json()["apis"]
        if f"{one['api']} {one['route']}" == name
    ]
    response = app.request("POST", ROUTES[name].route, json=_make_body(name, "zebra", 1))
    assert response.headers.get("x-tureen-ignored") == {"reported": "zebra", "refused": None}[others]
    assert response.status_code in {"reported": (200,), "refused": (400, 422)}[others]


def test_a_slip_of_a_known_name_is_refused_with_that_name(app):
    for name, route in ROUTES.items():
        if "model" not in route.parts[0].struct.__struct_fields__:
            continue
        response = app.request("POST", route.route, json=_make_body(name, "modell", "a"))
        assert response.status_code in (400, 422)
        assert "unknown field 'modell'" in response.text


def test_people_get_a_page_and_programs_get_json(app):
    page = app.request("GET", "/compat", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    rows = re.findall(r"<tr><td><code>([^<]+)</code></td><td class=(\w+)>", page.text)
    for answer in (
        app.request("GET", "/compat.json"),
        app.request("GET", "/compat", headers={"accept": "application/json"}),
    ):
        told = [(row["field"], row["standing"]) for one in answer.json()["apis"] for row in one["fields"]]
        assert told == rows
        assert ("parameters.watermark", "refused") in told


def test_names_in_a_note_are_shown_as_code(app: Servers):
    shown = app.request("GET", "/compat", headers={"accept": "text/html"}).text
    noted = [row.note for route in compat_routes() for row in rows_of(route)]
    assert any("`" in note for note in noted)
    assert "`" not in shown.partition("<main>")[2].partition("</main>")[0]
