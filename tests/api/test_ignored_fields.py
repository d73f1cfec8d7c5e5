"""A field that cannot be honoured and cannot change the answer is accepted, and the answer tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from app_under_test import App

CHAT = {"messages": [{"role": "user", "content": "say:ab"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(chat_template="chatml") as running:
        yield running


def _chat(app: App, headers: dict[str, str] | None = None, **fields: object):
    return app.request("POST", "/v1/chat/completions", json=CHAT | fields, headers=headers)


def test_the_answer_lists_the_field_in_its_head_and_in_its_body(app):
    answer = _chat(app, store=True)
    assert answer.headers["x-tureen-ignored"] == "store"
    assert answer.json()["ignored_fields"] == ["store"]


def test_an_answer_that_ignored_nothing_says_nothing(app):
    answer = _chat(app, store=False)
    assert "x-tureen-ignored" not in answer.headers
    assert "ignored_fields" not in answer.json()


def test_a_stream_lists_the_field_in_its_head_and_in_its_last_chunk(app):
    answer = _chat(app, store=True, stream=True)
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line.startswith("data: {")
    ]
    assert answer.headers["x-tureen-ignored"] == "store"
    assert [chunk.get("ignored_fields") for chunk in chunks] == [None] * (len(chunks) - 1) + [["store"]]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "verbosity": "low"}, "verbosity"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "verbosity": "medium"}, ""),
        ("/v1/responses", {"input": "a", "context_management": [{"type": "compaction"}]}, "context_management"),
    ],
)
def test_hints_that_the_server_does_not_follow_are_told(app, path, body, told):
    answer = app.post(path, **body)
    assert (answer.status_code, answer.headers.get("x-tureen-ignored", "")) == (200, told), answer.text


def test_fields_that_nobody_knows_are_told_at_any_depth(app):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "zebra": 1}], "yak": None}]
    answer = _chat(app, messages=messages, client_metadata={"a": 1})
    assert answer.headers["x-tureen-ignored"] == "client_metadata, messages[0].content[0].zebra"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"topK": 4}, "topK"),
        ({"max_length": 4}, "max_length"),
        ({"stop_sequences": ["a"]}, "stop_sequences"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}}, "shema"),
        ({"beam_width": 4}, "beam_width"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(app, fields, named):
    answer = _chat(app, **fields)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert "x-tureen-ignored" not in answer.headers


@pytest.mark.parametrize("fields", [{"store": True}, {"zebra": 1}, {"messages": [{**CHAT["messages"][0], "zebra": 1}]}])
def test_a_client_may_ask_for_an_error_in_place_of_a_field_without_effect(app, fields):
    assert _chat(app, {"x-tureen-strict": "0"}, **fields).status_code == 200
    refused = _chat(app, {"x-tureen-strict": "1"}, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] in ("no_effect", "unknown_parameter")
    assert _chat(app, {"x-tureen-strict": "1"}).status_code == 200


def test_a_strictness_that_is_neither_1_nor_0_is_refused(app):
    answer = _chat(app, {"x-tureen-strict": "please"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-tureen-strict")


def test_the_operator_may_have_unknown_fields_refused_or_told():
    with App(chat_template="chatml", unknown_fields="refuse") as strict:
        assert _chat(strict, zebra=1).json()["error"]["message"] == "unknown field 'zebra'"
        assert _chat(strict, store=True).headers["x-tureen-ignored"] == "store"


def test_generate_tells_of_unknown_fields_where_the_operator_says_so_and_not_of_slips():
    """At each level of the body; what would change the answer is refused as ever."""
    plain = {"text": "say:ab", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with App(unknown_fields="tell") as telling, App() as usual:

        def ask(app, **more):
            return app.post("/generate", **(plain | more))

        more = {"zebra": 1, "sampling_params": plain["sampling_params"] | {"yak": [1]}}
        told, alone = ask(telling, **more), ask(telling)
        assert told.status_code == 200, told.text
        assert set(told.headers["x-tureen-ignored"].split(", ")) == {"zebra", "sampling_params.yak"}
        assert told.json()["output_ids"] == alone.json()["output_ids"]
        assert "x-tureen-ignored" not in alone.headers
        assert ask(usual, zebra=1).json()["error"]["param"] == "zebra"
        for slip in ({"sampling_params": {"temprature": 1}}, {"stream_": True}):
            refused = ask(telling, **slip)
            assert (refused.status_code, "did you mean" in refused.text) == (400, True)
        strict = telling.request("POST", "/generate", json=plain | {"zebra": 1}, headers={"x-tureen-strict": "1"})
        assert (strict.status_code, strict.json()["error"]["param"]) == (400, "zebra")


def test_a_header_is_printable_and_of_bounded_length_whatever_the_names_are(app):
    fields = {f"zebra\r\n, é☃{number}" + "z" * 200: 1 for number in range(64)}
    answer = _chat(app, **fields)
    header = answer.headers["x-tureen-ignored"]
    assert answer.status_code == 200
    assert len(header) < 1100
    assert all(" " <= character <= "~" for character in header)
    *_, last = header.split(", ")
    assert int(last.removeprefix("and ").removesuffix(" more")) + len(header.split(", ")) - 1 == 64


def test_more_names_that_nobody_knows_than_can_be_looked_at_are_refused(app):
    answer = _chat(app, **{f"zebra{number}": 1 for number in range(65)})
    assert (answer.status_code, "more than 64 unknown fields" in answer.text) == (400, True)


def test_fields_are_counted_by_their_declared_names_and_unknown_ones_together():
    with App(chat_template="chatml") as app:
        _chat(app, store=True)
        _chat(app, zebra=1, store=True)
        _chat(app, yak=1, gnu=1)
        lines = [
            line for line in app.request("GET", "/metrics").text.splitlines() if "num_ignored_fields_total{" in line
        ]
    assert {(line.split('field="')[1].split('"')[0], line.split()[-1]) for line in lines} == {
        ("store", "2.0"),
        ("unknown", "2.0"),
    }


def test_a_repeated_answer_tells_it_again(app):
    key = {"idempotency-key": "again"}
    first, again = _chat(app, key, store=True), _chat(app, key, store=True)
    assert again.headers["idempotent-replayed"] == "true"
    assert [answer.headers["x-tureen-ignored"] for answer in (first, again)] == ["store"] * 2
