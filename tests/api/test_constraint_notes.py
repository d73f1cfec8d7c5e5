"""Every dialect's answer says what of its constraint was not enforced, whether it fits, and whether it ended early."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from app_under_test import App

from tureen.grammar_service import check

LIMIT = 60
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": r"^([a-z])\1$", "maxLength": 300}},
    "required": ["code"],
    "additionalProperties": False,
}
SAID = [{"role": "user", "content": "tell me"}]
NOTES = {"unenforced": ["pattern at /code"], "valid": False, "closed_early": True}

Place = Callable[[Any], dict[str, Any]]


class Dialect(NamedTuple):
    """A request with SCHEMA, and where in its answer and in the last events of its stream the notes stand."""

    path: str
    body: dict[str, Any]
    place: Place
    last: Place


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def listed(metadata: dict[str, str]) -> dict[str, Any]:
    """The notes of a response's metadata, whose values are strings."""
    notes = {name: metadata[name] == "true" for name in ("valid", "closed_early") if name in metadata}
    return notes | ({"unenforced": metadata["unenforced"].split(", ")} if "unenforced" in metadata else {})


def with_schema(schema: Any) -> dict[str, Dialect]:
    named = {"name": "x", "schema": schema}
    tgi = {"max_new_tokens": LIMIT, "seed": 1, "do_sample": True, "grammar": {"type": "json", "value": schema}}
    return {
        "sglang": Dialect(
            "/generate",
            {"text": "a", "sampling_params": {"max_new_tokens": LIMIT, "json_schema": schema}},
            lambda answer: answer["meta_info"],
            lambda text: events(text)[-1]["meta_info"],
        ),
        "chat": Dialect(
            "/v1/chat/completions",
            {"model": "fake-model", "messages": SAID, "max_tokens": LIMIT,
             "response_format": {"type": "json_schema", "json_schema": named}},
            lambda answer: answer["choices"][0],
            lambda text: [event for event in events(text) if event["choices"]][-1]["choices"][0],
        ),
        "responses": Dialect(
            "/v1/responses",
            {"model": "fake-model", "input": "tell me", "max_output_tokens": LIMIT,
             "text": {"format": {"type": "json_schema", **named}}},
            lambda answer: listed(answer["metadata"]),
            lambda text: listed(events(text)[-1]["response"]["metadata"]),
        ),
        "anthropic": Dialect(
            "/v1/messages",
            {"model": "fake-model", "messages": SAID, "max_tokens": LIMIT,
             "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            lambda answer: answer,
            lambda text: next(event["delta"] for event in events(text) if event["type"] == "message_delta"),
        ),
        "ollama": Dialect(
            "/api/chat",
            {"model": "fake-model", "messages": SAID, "options": {"num_predict": LIMIT}, "format": schema},
            lambda answer: answer,
            lambda text: json.loads(text.splitlines()[-1]),
        ),
        "tgi": Dialect(
            "/", {"inputs": "a", "parameters": tgi}, lambda answer: answer[0],
            lambda text: events(text)[-1]["details"],
        ),
        "tgi with details": Dialect(
            "/", {"inputs": "a", "parameters": {**tgi, "details": True}}, lambda answer: answer[0]["details"],
            lambda text: events(text)[-1]["details"],
        ),
        "mindie": Dialect(
            "/generate",
            {"prompt": "a", "max_tokens": LIMIT, "guided_json": schema},
            lambda answer: answer,
            lambda text: json.loads(text.split("\0")[-2]),
        ),
    }  # fmt: skip


UNSURE, SURE = with_schema(SCHEMA), with_schema({**SCHEMA, "properties": {"code": {"enum": ["ab", "abcd"]}}})


@pytest.fixture(scope="module")
def app():
    """What can be judged of its answers is judged, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHECK_TIMEOUT_S", "START_TIMEOUT_S", "MAX_WAIT_S"):
            patch.setattr(check, name, 120.0)
        with App(chat_template="chatml") as running:
            yield running


def answer(app: App, dialect: Dialect, *, stream: bool) -> dict[str, Any]:
    response = app.post(dialect.path, **dialect.body, stream=stream)
    assert response.status_code == 200, response.text
    return dialect.last(response.text) if stream else dialect.place(response.json())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", UNSURE)
def test_the_answer_says_what_became_of_its_constraint(app: App, name, stream):
    place = answer(app, UNSURE[name], stream=stream)
    assert {key: place.get(key) for key in NOTES} == NOTES


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", SURE)
def test_where_there_is_nothing_to_say_nothing_is_said(app: App, name, stream):
    assert not set(answer(app, SURE[name], stream=stream)) & set(NOTES)


def test_several_texts_in_one_place_are_valid_only_if_all_are(app: App):
    path, body = UNSURE["mindie"][:2]
    free = {**SCHEMA, "properties": {"code": {"type": "string", "pattern": r"^([a-z])?\1*$", "maxLength": 1}}}
    for seed in range(12):
        reply = app.post(path, **body | {"guided_json": free, "n": 3, "temperature": 1.0, "seed": seed}).json()
        fits = [re.fullmatch(r"[a-z]?", json.loads(text[2:])["code"]) is not None for text in reply["text"]]
        assert reply["valid"] is all(fits)
