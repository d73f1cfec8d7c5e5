"""What agents send in Anthropic's messages: documents, counts with hints, the body of the Claude Code CLI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from app_under_test import App

CLAUDE_CODE = Path(__file__).resolve().parents[1] / "golden" / "clients" / "claude_code.json"
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{# <tool_call> #}say:{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %};"
    "{% endfor %}"
)
"""The model says all that it was shown."""
TEXT = {"type": "text", "media_type": "text/plain", "data": "It rains."}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    file = tmp_path_factory.mktemp("templates") / "all.jinja"
    file.write_text(TEMPLATE)
    with App(chat_template=str(file)) as running:
        yield running


def body(*blocks, **more):
    return {"model": "default", "messages": [{"role": "user", "content": list(blocks)}], **more}


def said(app, *blocks):
    answer = app.post(PATH, **body(*blocks, max_tokens=300, temperature=0))
    assert answer.status_code == 200, answer.text
    return "".join(block["text"] for block in answer.json()["content"])


def document(source, **more):
    return {"type": "document", "source": source, **more}


ASKED = {"type": "text", "text": "What does it say?"}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (document(TEXT), "It rains."),
        (document(TEXT, title="Weather", context="of today"), "Weather\nof today\nIt rains."),
        (document({"type": "content", "content": "It snows."}), "It snows."),
        (
            document({"type": "content", "content": [{"type": "text", "text": "It is."}]}),
            "It is.",
        ),
        (document(TEXT, citations={"enabled": False}, cache_control={"type": "ephemeral"}), "It rains."),
    ],
)
def test_the_model_is_shown_the_text_of_a_document_as_if_it_were_a_text_block(app, block, text):
    assert said(app, block, ASKED) == said(app, {"type": "text", "text": text}, ASKED)
    plain = body({"type": "text", "text": text}, ASKED)
    counts = [app.post(COUNT, **sent).json()["input_tokens"] for sent in (body(block, ASKED), plain)]
    assert counts[0] == counts[1]


def test_the_result_of_a_tool_may_be_a_document(app):
    def conversation(content):
        use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        return {"model": "default", "max_tokens": 300, "temperature": 0, "messages": messages}

    answers = [
        app.post(PATH, **conversation(content)).json()["content"]
        for content in ([document(TEXT)], [{"type": "text", "text": TEXT["data"]}])
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        {"type": "url", "url": "https://example.org/a.pdf"},
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_pdf_is_refused_with_the_reason(app, source, path):
    limit = {"max_tokens": 5} if path == PATH else {}
    refused = app.post(path, **body(ASKED, document(source), **limit))
    message = refused.json()["error"]["message"]
    assert (refused.status_code, message.partition(":")[0]) == (400, "messages[0].content[1].source")
    assert "PDF" in message


def test_an_answer_with_citations_is_refused(app):
    refused = app.post(PATH, **body(document(TEXT, citations={"enabled": True}), max_tokens=5))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages[0].content[0].citations.enabled")


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_citations_of_a_document_in_a_tool_s_result_are_refused_too(app, path):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [document(TEXT, citations={"enabled": True})]}
    refused = app.post(path, **body(result, **({"max_tokens": 5} if path == PATH else {})))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("messages[0].content[0].content[0].citations.enabled")


def test_what_says_only_how_the_answer_is_made_is_told_by_a_count(app):
    plain = app.post(COUNT, **body(ASKED))
    hinted = app.post(COUNT, **body(ASKED, max_tokens=64, temperature=0.5, stop_sequences=["x"], stream=True))
    assert (hinted.status_code, hinted.json()["input_tokens"]) == (200, plain.json()["input_tokens"])
    assert set(hinted.headers["x-tureen-ignored"].split(", ")) == {
        "max_tokens", "temperature", "stop_sequences", "stream",
    }  # fmt: skip


def test_the_body_of_claude_code_runs_and_what_has_no_effect_is_told(tmp_path):
    (tmp_path / "short.jinja").write_text("{# <tool_call> #}say:hello")
    record, *_ = json.loads(CLAUDE_CODE.read_text(encoding="utf-8"))
    sent = record["request"]["body"]
    assert {"Bash", "Edit", "Read"} <= {tool["name"] for tool in sent["tools"]}
    with App(chat_template=str(tmp_path / "short.jinja")) as app:
        answer = app.post(record["request"]["path"], **sent)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    told = set(answer.headers["x-tureen-ignored"].split(", "))
    assert "output_config.effort" in told
    assert {name.rpartition(".")[2] for name in told} <= {"cache_control", "effort", "edits[0]"}
