"""Tools of `/v1/responses` in namespaces, tools that only other servers run, and the body of OpenAI's Codex."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest
from app_under_test import App
from openai.types.responses import Response, ResponseStreamEvent

PATH = "/v1/responses"
TEMPLATE = (
    "{# <tool_call> <think> #}{% for tool in tools or [] %}{{ '' if asked is defined }}{% endfor %}"
    "{{ messages[-1]['content'] }}"
)
SHOWN = (
    "{# <tool_call> #}say:{% for tool in tools or [] %}{{ tool['function']['name'] }}="
    "{{ tool['function']['description'] }};{% endfor %}{% for message in messages %}{{ message['role'][0] }}"
    "{% for call in message['tool_calls'] or [] %}<{{ call['function']['name'] }}>{% endfor %}{% endfor %}"
)
"""The model says which tools it was shown, who spoke, and which tools were called."""

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 9}}, "required": ["id"]}
SCHEMA |= {"additionalProperties": False}
LOOKUP = {"type": "function", "name": "lookup", "description": "Looks up.", "parameters": SCHEMA, "strict": False}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [LOOKUP]}
SEARCH = {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["example.com"]}}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
CODEX = Path(__file__).resolve().parents[1] / "golden" / "clients" / "codex.json"


def _app(tmp_path_factory, template: str) -> App:
    file = tmp_path_factory.mktemp("templates") / "chat.jinja"
    file.write_text(template)
    return App(chat_template=str(file))


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    with _app(tmp_path_factory, TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    with _app(tmp_path_factory, SHOWN) as running:
        yield running


def ask(app: App, said: Any = "abc", status: int = 200, **body: Any) -> httpx.Response:
    response = app.post(PATH, **({"input": said, "max_output_tokens": 300} | body))
    assert response.status_code == status, response.text
    if status == 200:
        Response.model_validate(
            {name: value for name, value in response.json().items() if name != "ignored_fields"},
            strict=True,
            extra="forbid",
        )
    return response


def text(app: App, **body: Any) -> str:
    return ask(app, **body).json()["output"][-1]["content"][0]["text"]


def told(response: httpx.Response) -> list[str]:
    header = response.headers.get("x-tureen-ignored", "")
    return header.split(", ") if header else []


def test_the_model_reads_a_namespace_s_tools_with_both_names_and_both_descriptions(shown):
    custom = {"type": "custom", "name": "sql"}
    spaces = [CRM | {"tools": [LOOKUP, custom]}, {"type": "namespace", "name": "mcp__a__", "tools": [LOOKUP]}]
    assert text(shown, tools=[*spaces, LOOKUP]) == (
        "crm__lookup=Customers.\n\nLooks up.;crm__sql=Customers.;mcp__a__lookup=Looks up.;lookup=Looks up.;u"
    )
    long = {"type": "namespace", "name": "n" * 60, "tools": [LOOKUP]}
    assert text(shown, tools=[long]) == "lookup=Looks up.;u"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_namespace_s_tool_names_both_and_can_be_sent_back(app, shown, stream):
    asked = {"tools": [CRM], "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    if stream:
        events = [json.loads(line[6:]) for line in ask_stream(app, **asked).splitlines() if line.startswith("data: ")]
        for event in events:
            EVENT.validate_python(event, strict=True, extra="forbid")
        [call] = events[-1]["response"]["output"]
        added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
        assert (added["namespace"], added["name"]) == ("crm", "lookup")
    else:
        [call] = ask(app, **asked).json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "lookup")
    assert json.loads(call["arguments"])["id"] <= 9
    items = [
        {"role": "user", "content": "a"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "b"},
    ]
    assert text(shown, input=items).endswith("ua<crm__lookup>t")


def ask_stream(app: App, **body: Any) -> str:
    response = app.post(PATH, **({"input": "abc", "max_output_tokens": 300, "stream": True} | body))
    assert response.status_code == 200, response.text
    return response.text


def test_a_choice_may_name_a_namespace_s_tool_by_its_own_name(app):
    other = LOOKUP | {"name": "other"}
    for choice in (
        {"type": "function", "name": "lookup"},
        {"type": "function", "name": "crm__lookup"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lookup"}]},
    ):
        output = ask(app, tools=[CRM, other], tool_choice=choice).json()["output"]
        assert {item["name"] for item in output} == {"lookup"}


def test_tools_that_only_others_run_are_left_out_and_told(shown):
    tools = [SEARCH, LOOKUP, {"type": "mcp", "server_label": "x", "server_url": "https://x"}, {"type": "local_shell"}]
    response = ask(shown, tools=tools)
    answer = response.json()
    assert answer["output"][0]["content"][0]["text"] == "lookup=Looks up.;u"
    assert told(response) == ["tools[0]", "tools[2]", "tools[3]"] == answer["ignored_fields"]
    assert [tool["type"] for tool in answer["tools"]] == ["function"]
    assert told(ask(shown, tools=[SEARCH])) == ["tools[0]"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert told(ask(shown, tools=[SEARCH, LOOKUP], tool_choice=allowed)) == ["tools[0]", "tool_choice.tools[0]"]


@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ([SEARCH, LOOKUP], {"type": "web_search"}, "tool_choice.type"),
        ([SEARCH], "required", "tool_choice"),
        (
            [SEARCH, LOOKUP],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            "tool_choice",
        ),
        ([{"type": "telepathy"}], "auto", "tools[0].type"),
        ([{"type": "function"}], "auto", "tools[0].name"),
        ([SEARCH, LOOKUP, LOOKUP], "auto", "tools[2].name"),
        ([SEARCH, CRM | {"tools": [LOOKUP | {"name": "a b"}]}], "auto", "tools[1].tools[0].name"),
        ([CRM | {"tools": [CRM]}], "auto", "tools[0].tools[0].type"),
        ([CRM | {"parameters": {}}], "auto", "tools[0].parameters"),
        ([LOOKUP | {"tools": []}], "auto", "tools[0].tools"),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(app, tools, choice, named):
    error = ask(app, status=400, tools=tools, tool_choice=choice).json()["error"]
    assert error["param"] == named
    assert named in error["message"]


def test_who_wants_no_field_without_effect_is_told_of_such_tools_by_an_error(shown):
    headers = {"x-tureen-strict": "1"}
    refused = shown.request("POST", PATH, json={"input": "a", "tools": [LOOKUP, SEARCH]}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[1]")


def codex_body() -> dict[str, Any]:
    record, *_ = json.loads(CODEX.read_text(encoding="utf-8"))
    return record["request"]["body"]


def test_the_body_of_codex_runs_and_what_has_no_effect_is_told(app):
    body = codex_body() | {"model": "default"}
    body["input"].append({"role": "user", "content": "say:<think>a</think>done"})
    response = app.post(PATH, **body)
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    for event in events:
        event.get("response", {}).pop("ignored_fields", None)
        EVENT.validate_python(event, strict=True, extra="forbid")
    done = events[-1]["response"]
    assert done["status"] == "completed"
    assert [item["type"] for item in done["output"]] == ["reasoning", "message"]
    assert set(told(response)) == {"client_metadata", "prompt_cache_key", "reasoning.summary", "tools[8]"}
    assert {"input_tokens", "output_tokens", "total_tokens"} <= done["usage"].keys()


def test_reasoning_that_a_client_keeps_sealed_comes_back_to_the_model(tmp_path_factory):
    template = "{# <think> #}say:{{ messages[-2]['reasoning_content'] }}"
    asked = {"include": ["reasoning.encrypted_content"], "store": False}
    with _app(tmp_path_factory, "{# <think> #}{{ messages[-1]['content'] }}") as app:
        first = ask(app, "say:<think>Köln, I think</think>yes", **asked).json()["output"]
        assert "encrypted_content" not in ask(app, "say:<think>a</think>b").json()["output"][0]
    sealed = {name: value for name, value in first[0].items() if name != "content"}
    with _app(tmp_path_factory, template) as app:
        items = [{"role": "user", "content": "a"}, sealed, first[1], {"role": "user", "content": "b"}]
        assert text(app, input=items, **asked) == "Köln, I think"
        foreign = sealed | {"encrypted_content": "gAAAAABn", "summary": [{"type": "summary_text", "text": "brief"}]}
        response = ask(app, [items[0], foreign, *items[2:]])
        assert told(response) == ["input[1].encrypted_content"]
        assert response.json()["output"][-1]["content"][0]["text"] == "brief"
