"""`/openapi.json` says what the routes take, and `/docs` shows it without help from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from app_under_test import App

from tureen.contract.params import ALIASES, SamplingParams
from tureen.http.dialect import Entry

PAGES = Path(__file__).resolve().parents[2] / "tureen" / "app" / "pages"


@pytest.fixture(scope="module")
def spec(app: App) -> dict[str, Any]:
    response = app.request("GET", "/openapi.json")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def _entries(app: App) -> list[Entry]:
    return [route for route in app.app.routes if isinstance(route, Entry)]


def _schema(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema that a validator can follow from."""
    return {"$ref": f"#/components/schemas/{name}", "components": spec["components"]}


def _operations(spec: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            yield path, method.upper(), operation


def test_what_a_body_is_takes_one_line_and_says_nothing_of_the_code(spec):
    about = {name: schema.get("description", "") for name, schema in spec["components"]["schemas"].items()}
    assert (
        about["SamplingParams"] == "The sampling parameters of one request: how its tokens are drawn and when it ends."
    )
    assert {name: text for name, text in about.items() if "\n" in text or "msgspec" in text} == {}


def test_every_route_says_what_it_is_and_a_post_what_it_takes(app):
    for entry in _entries(app):
        assert entry.docs is not None, f"{entry.path}: give it docs=Docs(…)"
        assert entry.docs.summary
        if entry.docs.bodies:
            assert entry.docs.example is not None, f"{entry.path}: give it an example"


def test_every_path_and_method_is_in_the_document_once(app, spec):
    told = {(path, method) for path, method, _ in _operations(spec)}
    for entry in _entries(app):
        assert {(entry.path_format, method) for method in entry.methods - {"HEAD"}} <= told
    ids = [operation["operationId"] for _, _, operation in _operations(spec)]
    assert len(ids) == len(set(ids))


def test_each_example_is_valid_against_its_schema(spec):
    for path, _, operation in _operations(spec):
        if "requestBody" not in operation:
            continue
        [content] = operation["requestBody"]["content"].values()
        (
            jsonschema.Draft202012Validator({**content["schema"], "components": spec["components"]}).validate(
                content["example"]
            ),
            path,
        )


def test_every_field_of_a_body_has_a_meaning(app, spec):
    for entry in _entries(app):
        for body in entry.docs.bodies:
            fields = spec["components"]["schemas"][body.__name__]["properties"]
            silent = [name for name, field in fields.items() if not field.get("description")]
            assert silent == [], f"{entry.path}: give them Meta(description=…)"


def test_no_object_has_other_fields_than_those_told(spec):
    told = spec["components"]["schemas"].items()
    assert [name for name, one in told if one.get("additionalProperties") is None and "Error" not in name] == []


def test_an_api_that_tells_unknown_fields_says_that_it_takes_them_and_another_takes_nulls(spec):
    schemas = spec["components"]["schemas"]
    assert schemas["OllamaGenerateBody"]["additionalProperties"] is True
    assert schemas["SamplingParams"]["additionalProperties"] == {"type": "null"}


def test_sampling_parameters_have_their_names_defaults_and_bounds(spec):
    told = spec["components"]["schemas"]["SamplingParams"]["properties"]
    assert set(told) == {field.name for field in msgspec.structs.fields(SamplingParams)} | set(ALIASES)
    assert told["top_p"]["default"] == 1.0
    check = jsonschema.Draft202012Validator(_schema(spec, "SamplingParams"))
    for good in ({"top_p": 1}, {"stop": "a"}, {"stop": ["a"]}, {"seed": None}, {"max_new_tokens": None}, {"n": 4096}):
        assert check.is_valid(good), good
    for bad in ({"top_p": 0}, {"top_p": 1.1}, {"n": 4097}, {"stop": 5}, {"temprature": 1}, {"dtype": "list"}):
        assert not check.is_valid(bad), bad


def test_sampling_params_stand_in_the_body_of_generate(spec):
    check = jsonschema.Draft202012Validator(_schema(spec, "GenerateBody"))
    assert check.is_valid({"text": "a", "sampling_params": [{"top_k": 5}], "session_params": {"id": "a"}})
    assert not check.is_valid({"text": "a", "sampling_params": {"top_q": 5}})
    assert not check.is_valid({"text": "a", "session_params": {"name": "a"}})


def test_access_is_told(spec):
    security = {path: operation["security"] for path, _, operation in _operations(spec)}
    assert security["/health"] == security["/docs"] == security["/openapi.json"] == []
    assert security["/generate"] == [{"key": []}]
    assert security["/pause_generation"] == [{"admin_key": []}]


def test_the_pages_are_open_though_the_server_has_a_key():
    with App(api_key="secret") as closed:
        for path in ("/docs", "/openapi.json", "/compat", "/compat.json"):
            assert closed.request("GET", path).status_code == 200
        assert closed.request("GET", "/v1/models").status_code == 401


@pytest.mark.parametrize("path", ["/docs", "/compat"])
def test_a_page_loads_nothing_and_runs_nothing_but_what_stands_in_it(app, path):
    response = app.request("GET", path)
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//|@import|url\(", response.text)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        for text in re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\son\w+=|\sstyle=", response.text), "a browser would refuse it"


def test_the_page_is_small():
    assert sum(file.stat().st_size for file in PAGES.iterdir()) < 45_000


def test_the_document_has_the_schemas_that_it_names_and_no_others(spec):
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(spec)))
    assert all(one.startswith("#/components/schemas/") for one in references)
    assert {one.rpartition("/")[2] for one in references} == set(spec["components"]["schemas"])
