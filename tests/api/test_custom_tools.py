"""OpenAI's custom tools: their input is a text of the grammar that the tool has, in chats and in responses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from app_under_test import App
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from openai_judge import make_client
from served_app import ServedApp

from tureen.text.free_input import FreeInputReader
from tureen.text.tools import FORMATS as FORMATS_OF_CALLS

LARK = r"""
start: "say \"" WORD "\"\n" (WORD "\\")? (WORD ":")?
WORD: /[a-z]{1,4}/
"""
SAID = re.compile(r'say "[a-z]{1,4}"\n(?:[a-z]{1,4}\\)?(?:[a-z]{1,4}:)?')
FORMATS = {
    "lark": (LARK, SAID),
    "regex": (r'<[^"<>]{2,5}>"', re.compile(r'<[^"<>]{2,5}>"')),
}
PLAIN = {"type": "function", "function": {"name": "plain"}}
CHOICE = {"type": "custom", "custom": {"name": "shell"}}
LIMITS = {"max_tokens": 300, "seed": 3}


TEMPLATE = "{# <tool_call> #}{% if tools %}{% endif %}{{ messages[-1]['content'] }}"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def app(template):
    with App(chat_template=template) as running:
        yield running


def tool(syntax: str, definition: str = "") -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition or FORMATS[syntax][0]}
    return {"type": "custom", "custom": {"name": "shell", "format": {"type": "grammar", "grammar": grammar}}}


def ask(app: App, text: str = "a", status: int = 200, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "tool_choice": CHOICE, **LIMITS, **fields}
    response = app.request("POST", "/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("syntax", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_the_input_is_a_text_of_the_grammar(app: App, syntax, seed):
    answer = ask(app, tools=[tool(syntax)], seed=seed)
    [call] = ChatCompletion.model_validate(answer).choices[0].message.tool_calls
    assert call.type == "custom"
    assert call.custom.name == "shell"
    assert FORMATS[syntax][1].fullmatch(call.custom.input), call.custom.input
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("syntax", FORMATS)
def test_a_grammar_is_kept_wherever_the_model_calls(app: App, syntax):
    begin, definition = '<tool_call>\n{"name": "shell", "arguments": ', FORMATS[syntax][0]
    answer = ask(app, f"say:{begin}", tools=[tool(syntax, definition)], tool_choice="auto")
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert FORMATS[syntax][1].fullmatch(call["custom"]["input"])


PATCH = r"""
start: "*** Begin Patch\n" hunk+ "*** End Patch" LF?
hunk: "*** Add File: " NAME LF ("+" LINE LF)+ | "*** Delete File: " NAME LF
NAME: /[a-z.]+/
LINE: /[^\n]*/
LF: "\n"
"""
"""A grammar in the manner of agents that edit files: its texts have lines of anything."""


@pytest.mark.parametrize("form", FORMATS_OF_CALLS, ids=lambda form: form.NAMES[0])
def test_every_format_of_calls_keeps_a_grammar(template, form):
    """An agent sends its tools with tool_choice auto to any model; whatever format that has, the tool works."""
    with App(chat_template=template, tool_call_parser=form.NAMES[0]) as app:
        for syntax, (_, said) in FORMATS.items():
            [call] = ask(app, tools=[tool(syntax)])["choices"][0]["message"]["tool_calls"]
            assert said.fullmatch(call["custom"]["input"]), call
        for fields in ({"tool_choice": "auto"}, {"tool_choice": "auto", "parallel_tool_calls": False}):
            ask(app, tools=[PLAIN, tool("lark", PATCH)], **fields)
        error = ask(app, status=400, tools=[PLAIN, tool("lark", "start: other")], tool_choice="auto")["error"]
        assert error["param"] == "tools[1].custom.format.grammar.definition"


def test_without_a_format_the_input_is_any_text(app: App):
    free = {"type": "custom", "custom": {"name": "shell", "description": "Runs it."}}
    call = '<tool_call>\n{"name": "shell", "arguments": {"input": "echo \\"\\u00e9\\" | cat\\n"}}\n</tool_call>'
    answer = ask(app, f"say:{call}", tools=[free], tool_choice="auto")
    [said] = answer["choices"][0]["message"]["tool_calls"]
    assert said["custom"] == {"name": "shell", "input": 'echo "é" | cat\n'}


@pytest.mark.parametrize("syntax", FORMATS)
def test_a_stream_of_a_chat_gives_the_same_input_in_pieces(template, syntax):
    with ServedApp(chat_template=template) as server, make_client(server.url) as client:
        asked: dict[str, Any] = {
            "model": "fake-model",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [tool(syntax)],
            "tool_choice": CHOICE,
            **LIMITS,
        }
        whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].custom.input
        text, names = "", []
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    told = call.model_dump()["custom"]
                    text += told.get("input", "")
                    names += [told["name"]] if "name" in told else []
        assert (text, names) == (whole, ["shell"])


def respond(app: App, **fields: Any) -> Any:
    body = {"input": "a", "max_output_tokens": 300, "seed": 3, **fields}
    response = app.request("POST", "/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("syntax", FORMATS)
def test_a_response_has_the_call_as_an_item_and_takes_it_back(app: App, syntax):
    definition, pattern = FORMATS[syntax]
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    asked = {"tools": [{"type": "custom", "name": "shell", "format": form}]}
    choice = {"type": "custom", "name": "shell"}
    answer = respond(app, **asked, tool_choice=choice).json()
    [item] = Response.model_validate(answer).output
    assert item.type == "custom_tool_call"
    assert item.name == "shell"
    assert pattern.fullmatch(item.input), item.input
    events = [
        json.loads(line.removeprefix("data: "))
        for line in respond(app, **asked, tool_choice=choice, stream=True).text.splitlines()
        if line.startswith("data: ")
    ]
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    [done] = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(pieces) == done == item.input
    back = [
        {"role": "user", "content": "a"},
        *answer["output"],
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"},
    ]
    assert respond(app, **asked, input=back, tool_choice="none").json()["status"] in ("completed", "incomplete")


def test_a_call_can_be_sent_back_in_a_chat(app: App):
    [call] = ask(app, tools=[tool("regex")])["choices"][0]["message"]["tool_calls"]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    body = {"messages": messages, "tools": [tool("regex")], "tool_choice": "none", "max_tokens": 5}
    assert app.request("POST", "/v1/chat/completions", json=body).status_code == 200


REFUSED = [
    ({"tools": [tool("lark", "start: other")]}, "tools[0].custom.format.grammar.definition"),
    ({"tools": [PLAIN, tool("regex", "(")]}, "tools[1].custom.format.grammar.definition"),
    ({"tools": [tool("peg", "a")]}, "tools[0].custom.format.grammar.syntax"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "shell", "format": {"type": "grammar"}}}]}, "tools[0].custom"),
    ({"tools": [tool("regex")], "tool_choice": {"type": "function", "function": {"name": "shell"}}}, "tool_choice"),
    ({"tools": [tool("regex"), PLAIN], "tool_choice": {"type": "custom", "custom": {"name": "plain"}}}, "tool_choice"),
    ({"tools": [tool("regex")], "structural_tag": {"type": "structural_tag", "format": {}}}, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_is_refused_by_the_clients_name_for_it(app: App, fields, param):
    error = ask(app, status=400, **fields)["error"]
    assert error["param"].startswith(param), error


TEXTS = ["\udc00 alone", 'a "quoted" \\ line\n', "é\U0001f600 \u2028", "", "\ud83d alone", "x" * 200]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_input_is_read_in_pieces_of_any_size(text, is_ascii, size):
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader = FreeInputReader()
    told = "".join(reader.feed(written[at : at + size]) for at in range(0, len(written), size)) + reader.close()
    assert told == text or "alone" in text
    if is_ascii:
        told.encode()  # half of a pair is told as it was written


@pytest.mark.parametrize("written", ['{"other": 1}', '{"input": 5}', "", '{"inp', "[" * 100])
def test_arguments_of_another_form_are_told_as_they_are(written):
    reader = FreeInputReader()
    assert "".join(map(reader.feed, written)) + reader.close() == written


def test_the_command_of_the_page_calls_with_a_sum(app: App):
    page = (Path(__file__).resolve().parents[2] / "docs" / "tool-calls.md").read_text(encoding="utf-8")
    section = page.partition("## Custom tools")[2].partition("\n## ")[0]
    [command] = re.findall(r"^curl .*?}'$", section, re.MULTILINE | re.DOTALL)
    answer = app.request("POST", "/v1/chat/completions", json=json.loads(shlex.split(command)[-1])).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4}){1,3}", call["custom"]["input"])
