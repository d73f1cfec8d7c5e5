"""OpenAI's `/v1/responses`; its own client reads the answers, its own models say whether they are right."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
from app_under_test import App
from fake_engine import CONTEXT_LEN
from openai.types.responses import Response, ResponseStreamEvent
from openai_judge import make_client
from served_app import ServedApp

from tureen.dialects.openai.responses_body import TABLE, ResponsesBody, parse
from tureen.dialects.openai.responses_input import conversation_of, kept_items

PATH = "/v1/responses"
TEMPLATE = (
    "{# <tool_call> <think> #}{{ 'no' if enable_thinking is defined and not enable_thinking }}{{ '' if tools }}"
    "{{ messages[-1]['content'] }}"
)
"""The model is sent what was said last, and answers as fake_engine.py says. It knows tools and can be told to think."""

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("templates") / "last.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def app(template):
    with App(chat_template=template) as running:
        yield running


@pytest.fixture(scope="module")
def client(template):
    with ServedApp(chat_template=template) as server, make_client(server.url) as found:
        yield found


def ask(app: App, said="say:hi", status: int = 200, **body):
    response = app.post(PATH, **{"input": said, **body})
    assert response.status_code == status, response.text
    answer = response.json()
    if status == 200:
        declared = {name: value for name, value in answer.items() if name != "ignored_fields"}
        Response.model_validate(declared, strict=True, extra="forbid")
    return answer


def refusal(app: App, **body) -> dict:
    return ask(app, status=400, **body)["error"]


def events(app: App, said="say:hi", **body) -> list[dict]:
    response = app.post(PATH, **{"input": said, "stream": True, **body})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_ids(items: list[dict]) -> list[dict]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def message(text: str, status: str = "completed") -> dict:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


def test_the_shortest_request(app: App):
    answer = ask(app, "say:hello")
    assert without_ids(answer["output"]) == [message("hello")]
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert (answer["model"], answer["truncation"]) == ("fake-model", "disabled")
    usage = answer["usage"]
    assert usage["input_tokens"] == len("say:hello")
    assert usage["output_tokens"] == len("hello") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_the_answer_says_what_it_was_asked_for(app: App):
    asked = {
        "instructions": "be good",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "parallel_tool_calls": False,
        "tools": [WEATHER],
        "tool_choice": "none",
        "safety_identifier": "someone",
        "user": "me",
    }
    answer = ask(app, "say:a", metadata={"k": "v"}, **asked)
    assert {name: answer[name] for name in asked} == asked
    assert answer["metadata"]["k"] == "v"


STREAMED = [
    ("say:héllo wörld", {}),
    ("say:<think>hm, 你好</think>\n\nyes", {}),
    (f"say:let me see {CALL}", {"tools": [WEATHER]}),
    (f"say:<think>call it</think>{CALL}\n{CALL}", {"tools": [WEATHER]}),
    (f"say:{CALL}", {"tools": [WEATHER], "max_output_tokens": 50}),
    ("abc", {"max_output_tokens": 30}),
    ("say:", {}),
]


@pytest.mark.parametrize(("said", "fields"), STREAMED)
def test_a_joined_stream_is_the_whole_answer(app: App, client, said, fields):
    whole = ask(app, said, temperature=0, **fields)
    with client.responses.stream(model="fake-model", input=said, temperature=0, **fields) as stream:
        deltas: dict[int, str] = {}
        for event in stream:
            if event.type.endswith(".delta"):
                deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
            if event.type in ("response.completed", "response.incomplete"):
                last = event.response.model_dump(exclude_unset=True)
    for item in last["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert (last["status"], last["incomplete_details"]) == (whole["status"], whole["incomplete_details"])
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in whole["output"]]
    assert [deltas.get(index, "") for index in range(len(texts))] == texts


def test_every_event_is_one_of_openai_s_and_numbered(app: App):
    found = events(app, f"say:<think>a</think>b{CALL}", tools=[WEATHER])
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    for one in found:
        EVENT.validate_python(one, strict=True, extra="forbid")
    kinds = list(dict.fromkeys((one["type"], one.get("output_index")) for one in found))
    reasoning, text, call = (
        [
            (f"response.{kind}", index)
            for kind in (
                "output_item.added",
                *(["content_part.added"] if index < 2 else []),
                f"{name}.delta",
                f"{name}.done",
                *(["content_part.done"] if index < 2 else []),
                "output_item.done",
            )
        ]
        for index, name in enumerate(("reasoning_text", "output_text", "function_call_arguments"))
    )
    started = [("response.created", None), ("response.in_progress", None)]
    assert kinds == [*started, *reasoning, *text, *call, ("response.completed", None)]
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    added = [one["item"] for one in found if one["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item.get("content", []) for item in added] == [[], [], []]


def test_an_answer_that_was_cut_is_incomplete(app: App):
    answer = ask(app, "say:one two", max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert without_ids(answer["output"]) == [message("one", "incomplete")]
    assert events(app, "say:one two", max_output_tokens=3)[-1]["type"] == "response.incomplete"
    assert ask(app, "abc")["usage"]["total_tokens"] == CONTEXT_LEN
    assert ask(app, "abc", max_output_tokens=-1)["usage"]["total_tokens"] == CONTEXT_LEN


def test_a_deadline_leaves_what_there_was(template):
    with App(chat_template=template, slow=True) as app:
        for deadline_ms in (200, 2_000, 12_000):  # until one is long enough for a machine that is held up
            answer = app.post(PATH, input="abc", deadline_ms=deadline_ms).json()
            if answer.get("output"):
                break
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "deadline"})
        assert answer["output"][0]["content"][0]["text"]


def test_reasoning_is_an_item_and_counted(app: App):
    answer = ask(app, "say:<think>hm</think>yes")
    assert without_ids(answer["output"]) == [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "status": "completed",
        },
        message("yes"),
    ]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
    assert ask(app, "say:a", reasoning={"effort": "none"}, max_output_tokens=1)["usage"]["input_tokens"] == len(
        "nosay:a"
    )
    told = app.post(PATH, input="say:a", reasoning={"effort": "high"})
    assert (told.status_code, told.headers["x-tureen-ignored"]) == (200, "reasoning.effort")


def test_calls_of_functions(app: App):
    answer = ask(app, f"say:{CALL}\n{CALL}", tools=[WEATHER])
    assert [(item["type"], item["name"], json.loads(item["arguments"])) for item in answer["output"]] == [
        ("function_call", "weather", {"city": "Köln"})
    ] * 2
    assert len({item["call_id"] for item in answer["output"]}) == 2
    assert answer["status"] == "completed"


def test_the_choice_of_tools_is_honoured(app: App):
    other = WEATHER | {"name": "other"}

    def called(choice, **fields) -> set[str]:
        output = ask(app, "abc", tools=[WEATHER, other], tool_choice=choice, max_output_tokens=400, **fields)["output"]
        return {item["name"] for item in output if item["type"] == "function_call"}

    only = [{"type": "function", "name": "other"}]
    assert called("required")
    assert called({"type": "function", "name": "other"}) == {"other"}
    assert called({"type": "allowed_tools", "mode": "required", "tools": only}) == {"other"}
    assert called("none") == set()
    one = ask(app, "abc", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=400)
    assert [item["type"] for item in one["output"]] == ["function_call"]


def test_formats_of_the_text(app: App):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    answer = ask(app, "abc", text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    assert json.loads(answer["output"][0]["content"][0]["text"]).keys() == {"a"}
    assert ask(app, "say:a", text={"format": {"type": "text"}, "verbosity": "medium"})["output"]
    assert ask(app, "say:{}", text={"format": {"type": "json_object"}}, max_output_tokens=5)["output"]


def test_what_is_not_enforced_is_in_the_metadata(app: App):
    unsure = {"type": "array", "not": {"type": "array", "uniqueItems": True}}
    tags = {"type": "object", "properties": {"a": unsure}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "x", "schema": tags}}
    answer = ask(app, 'say:{"a": [1, 2]}', text=text)
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": [1, 2]}
    assert answer["metadata"]["unenforced"] == "not at /a"
    assert answer["metadata"]["valid"] == "false"
    refused = app.post(PATH, input="a", text={"format": text["format"] | {"strict": True}})
    assert refused.status_code == 400
    assert "uniqueItems" in refused.json()["error"]["message"]


def _conversation(items, instructions=None):
    body = parse({"input": items, "instructions": instructions})
    return conversation_of(body.input, body.instructions)


def test_items_become_messages_of_a_chat():
    talk = _conversation(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            message("wait") | {"id": "msg"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln"}', "id": None},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""},
            {"type": "function_call_output", "call_id": "c2", "output": "noon"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "message", "role": "assistant", "content": "so"},
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"},
                    {"type": "input_text", "text": "look"},
                ],
            },
        ],
        "be good",
    )
    calls = [("c1", "weather", {"city": "Köln"}), ("c2", "time", {})]
    assert talk.messages == [
        {"role": "system", "content": "be good\n\nbe brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for one, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "name": "time", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]},
    ]
    assert talk.pictures == ["data:image/png;base64,aGk="]


FOREIGN = [
    (
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}],
        ("web_search", {"action": {"type": "search", "query": "q"}}, '{"status":"completed"}'),
    ),
    (
        [{"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": [{"text": "found"}]}],
        ("file_search", {"queries": ["q"]}, '{"results":[{"text":"found"}]}'),
    ),
    (
        [{"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "c", "outputs": None}],
        ("code_interpreter", {"code": "1+1", "container_id": "c"}, "{}"),
    ),
    (
        [{"type": "mcp_call", "id": "m", "name": "add", "server_label": "s", "arguments": '{"a":1}', "output": "2"}],
        ("add", {"a": 1}, '{"output":"2"}'),
    ),
    (
        [{"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "add"}]}],
        ("mcp_list_tools", {"server_label": "s"}, '{"tools":[{"name":"add"}]}'),
    ),
    (
        [
            {"type": "mcp_approval_request", "id": "r", "name": "add", "server_label": "s", "arguments": "{}"},
            {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True},
        ],
        ("add", {}, '{"approve":true}'),
    ),
    (
        [
            {"type": "local_shell_call", "id": "x", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ],
        ("local_shell", {"action": {"command": ["ls"]}}, '{"output":"a.txt"}'),
    ),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": "completed"},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        ],
        ("shell", {"action": {"commands": ["ls"]}}, '{"output":[{"stdout":"a","stderr":""}]}'),
    ),
    (
        [
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no a"},
        ],
        (
            "apply_patch",
            {"operation": {"type": "delete_file", "path": "a"}},
            '{"status":"failed","output":"no a"}',
        ),
    ),
    (
        [
            {"type": "computer_call", "id": "i", "call_id": "c", "action": {"type": "screenshot"}},
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        ],
        ("computer", {"action": {"type": "screenshot"}}, '{"output":{"type":"computer_screenshot"}}'),
    ),
    (
        [{"type": "image_generation_call", "id": "ig", "status": "completed", "result": "aGk="}],
        ("image_generation", {}, '{"status":"completed"}'),
    ),
    (
        [
            {"type": "tool_search_call", "id": "i", "call_id": None, "arguments": {"goal": "g"}},
            {"type": "tool_search_output", "id": "o", "call_id": None, "tools": []},
        ],
        ("tool_search", {"goal": "g"}, '{"tools":[]}'),
    ),
]  # fmt: skip


def test_a_conversation_that_began_on_another_server_continues():
    """Each item of a tool that only other servers run is a call, and a result that the model reads as JSON."""
    for items, (name, arguments, result) in FOREIGN:
        talk = _conversation([{"role": "user", "content": "a"}, *items, message("b")])
        _, asked, answered, said = talk.messages
        [call] = asked["tool_calls"]
        assert call["function"] == {"name": name, "arguments": arguments}, items
        assert answered == {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}, items
        assert said["content"] == "b"


def test_kept_items_of_another_server_are_read_as_they_were_sent():
    for items, _ in FOREIGN:
        sent = [{"role": "user", "content": "a"}, *items]
        body = parse({"input": sent})
        kept = kept_items(body.input)
        assert all(item["id"] for item in kept)
        talk = conversation_of([], None, kept, "previous_response_id")
        assert [_plain(each) for each in talk.messages] == [_plain(each) for each in _conversation(sent).messages]


def _plain(message):
    """Return a message without the ids of its calls."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {name: message.get(name) for name in ("role", "name", "content")} | {"calls": calls}


def test_a_screenshot_of_another_server_s_computer_is_a_picture():
    shown = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aGk="}
    items = [
        {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c", "output": shown},
    ]
    talk = _conversation([{"role": "user", "content": "a"}, *items])
    assert (talk.messages[-1]["content"], talk.pictures) == ([{"type": "image"}], [shown["image_url"]])


def test_what_only_another_server_can_read_is_left_out_and_reported(app: App):
    said = {"role": "user", "content": "say:x"}
    for item, told in (
        ({"type": "compaction", "id": "c", "encrypted_content": "x"}, "input[0]"),
        ({"type": "image_generation_call", "id": "ig", "result": "aGk="}, "input[0].result"),
        ({"type": "web_search_call", "id": "w", "results": [{"encrypted_content": "x"}]}, "input[0].results[0]."),
        (
            {
                "type": "mcp_call",
                "id": "m",
                "name": "f",
                "arguments": "",
                "output": {"url": "data:image/png;base64,aGk="},
            },
            "input[0].output.url",
        ),
    ):
        answer = app.post(PATH, input=[item, said], max_output_tokens=2)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-tureen-ignored"].startswith(told)
    talk = _conversation([{"type": "mcp_call", "id": "m", "name": "f", "arguments": "", "output": "data: x"}])
    assert talk.messages[0]["tool_calls"][0]["function"]["arguments"] == {}
    assert talk.messages[1]["content"] == '{"output":"data: x"}'


def test_an_answer_can_be_sent_back_as_it_came(client):
    said = f"say:<think>a</think>b{CALL}"
    answer = client.responses.create(model="fake-model", input=said, tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "say:fine"}
    items = [{"role": "user", "content": said}, *(item.model_dump() for item in answer.output), result]
    assert client.responses.create(model="fake-model", input=items, tools=[WEATHER]).output_text == "fine"


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([], "input"),
        (5, "input"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"role": "robot", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].file_data"),
        ([{"role": "user", "content": [{"type": "output_text", "text": "a"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}], "input[0].content[0].file_id"),
        ([{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([{"type": "function_call_output", "call_id": "x", "output": "a"}], "input[0].call_id"),
        ([{"type": "shell_call_output", "call_id": "x", "output": []}], "input[0].call_id"),
        ([{"type": "foreign_item", "item": {}}], "input[0].type"),
        ([{"type": "reasoning", "id": "x", "summary": [{"type": "text"}]}], "input[0].summary[0].type"),
    ],
)
def test_input_of_a_wrong_form_is_refused_by_name(app: App, items, named):
    assert refusal(app, input=items)["param"] == named


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input": [{"role": "user", "content": "a", "foo": 1}]}, "input[0].foo"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ],
)
def test_fields_inside_that_this_server_does_not_know_are_told(app: App, fields, told):
    answer = app.post("/v1/responses", **{"input": "hi", "max_output_tokens": 2} | fields)
    assert (answer.status_code, answer.headers["x-tureen-ignored"]) == (200, told)
    assert answer.json()["ignored_fields"] == [told]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_output_tokens": -3}, "max_output_tokens"),
        ({"max_output_tokens": CONTEXT_LEN + 1}, "max_output_tokens"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 129}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
        ({"metadata": {"a": 1}}, "metadata['a']"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"stream_options": {}}, "stream_options"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_fields_out_of_bounds_are_refused_by_name(app: App, fields, named):
    assert refusal(app, **fields)["param"] == named


def test_what_is_not_offered_is_refused_by_name_unless_it_asks_for_nothing(app: App):
    names = [name for name in TABLE.refused if "*" not in name]
    for name in names:
        error = refusal(app, **{name: "something"})
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is not available: ")
    nothing = {name: TABLE.refused[name][0] for name in names}
    assert without_ids(ask(app, "say:a", **nothing)["output"]) == [message("a")]


def test_null_is_the_default_of_every_field(app: App):
    nulls = dict.fromkeys(set(ResponsesBody.__struct_fields__) - {"input"})
    assert without_ids(ask(app, "say:a", **nulls)["output"]) == [message("a")]


def test_sampling_parameters_of_other_apis_act(app: App):
    assert without_ids(ask(app, "say:abc", stop=["b"])["output"]) == [message("a")]
    texts = [ask(app, "abc", seed=7, max_output_tokens=20)["output"][0]["content"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]


def test_the_client_knows_the_errors(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake-model", input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(model="fake-model", input="a", temperature=-1, stream=True)


def test_a_fault_in_a_stream_is_its_last_event(app: App):
    assert app.post(PATH, input="say:\x01a").status_code == 500
    found = events(app, "say:ok\x01a")
    assert found[0]["type"] == "response.created"
    ends = ("response.completed", "response.incomplete", "response.failed")
    assert [one["type"] for one in found if one["type"] in ends] == ["response.failed"], "it ends once"
    assert found[-1]["type"] == "response.failed"
    EVENT.validate_python(found[-1], strict=True)
    assert found[-1]["response"]["status"] == "failed"
    assert "the model failed" in found[-1]["response"]["error"]["message"]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    app.check_idle()


def test_a_client_that_leaves_ends_its_request(template):
    with ServedApp(chat_template=template, slow=True) as server:
        with httpx.stream("POST", server.url + PATH, json={"input": "abc", "stream": True}) as response:
            next(response.iter_bytes())
        server.wait_until(lambda: not server.stats.num_running, "the end of a stream without a reader")
        server.abandon(PATH, {"input": "abc"}, lambda: server.stats.num_running)
        server.wait_until(lambda: not server.stats.num_running, "the end of a request whose client left")
