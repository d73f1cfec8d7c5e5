"""OpenAI's `/v1/chat/completions`; its own client reads the answers, its own models say whether they are right."""

from __future__ import annotations

import base64
import io
import itertools
import json

import httpx
import openai
import pydantic
import pytest
import tiny_llava
from app_under_test import App, parse_events
from byte_tokenizer import EOS, VOCAB_SIZE
from fake_engine import CONTEXT_LEN
from openai_judge import joined_messages, judge, make_client
from PIL import Image
from served_app import ServedApp

from tureen.dialects.openai.answer import StreamUsage
from tureen.dialects.openai.chat_body import TABLE
from tureen.media.loader import MediaLoader
from tureen.requests.generation import Run

PATH = "/v1/chat/completions"
TEMPLATE = "{# <tool_call> <think> #}{% if tools %}{% endif %}{{ messages[-1]['content'] }}"
"""The model is sent what was said last, and answers as fake_engine.py says. It knows tools and reasoning."""

AS_JSON = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{{ tools | tojson }}\n{{ extra }}"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


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


def user(text) -> list[dict]:
    return [{"role": "user", "content": text}]


def ask(app: App, said=None, status: int = 200, **body):
    if said is not None:
        body["messages"] = user(said)
    response = app.post(PATH, **body)
    assert response.status_code == status, response.text
    answer = response.json()
    if status == 200:
        judge(answer)
    return answer


def choice(app: App, said, **body):
    [one] = ask(app, said, **body)["choices"]
    return one


def refusal(app: App, said="say:a", status: int = 400, **body):
    return ask(app, said, status, **body)["error"]


def chunks(app: App, said, **body):
    response = app.post(PATH, messages=user(said), **body, stream=True)
    assert response.status_code == 200, response.text
    found = parse_events(response.text)
    for chunk in found:
        judge(chunk, is_chunk=True)
    return found


def test_the_client_gets_an_answer(client):
    answer = client.chat.completions.create(model="fake-model", messages=user("say:héllo"))
    [one] = answer.choices
    assert one.message.role == "assistant"
    assert one.message.content == "héllo"
    assert one.message.tool_calls is None
    assert one.finish_reason == "stop"
    assert one.matched_stop == EOS
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens == 10
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_the_client_streams_an_answer(client):
    stream = client.chat.completions.create(
        model="fake-model", messages=user("say:héllo"), n=2, stream=True, stream_options={"include_usage": True}
    )
    *found, last = list(stream)
    for index in (0, 1):
        first, *middle, end = [chunk.choices[0] for chunk in found if chunk.choices[0].index == index]
        assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
        assert "".join(one.delta.content for one in middle) == "héllo"
        assert {one.finish_reason for one in middle} == {None}
        assert (end.delta.content, end.finish_reason) == (None, "stop")
    assert last.choices == []
    assert last.usage.completion_tokens == 14
    assert {chunk.usage for chunk in found} == {None}


def test_the_client_s_own_helper_puts_a_stream_together(client):
    with client.chat.completions.stream(
        model="fake-model", messages=user(f"say:Let me see.{CALL}"), tools=[WEATHER]
    ) as stream:
        answer = stream.get_final_completion()
    [one] = answer.choices
    assert one.message.content == "Let me see."
    [call] = one.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert call.id.startswith("call_")
    assert one.finish_reason == "tool_calls"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=4)
    age: int = pydantic.Field(ge=0, le=99)


def test_the_client_parses_answers_into_models(client):
    answer = client.chat.completions.parse(
        model="fake-model", messages=user("a person"), response_format=Person, seed=1, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    tool = openai.pydantic_function_tool(Person, name="store")
    answer = client.chat.completions.parse(
        model="fake-model",
        messages=user("a person"),
        tools=[tool],
        tool_choice="required",
        seed=2,
        max_tokens=200,
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)


def test_a_conversation_with_tools_goes_on_with_what_the_client_was_given(client):
    messages = user(f"say:{CALL}")
    message = client.chat.completions.create(model="fake-model", messages=messages, tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "say:rain"}
    for back in (message, message.model_dump(), message.to_dict()):
        answer = client.chat.completions.create(model="fake-model", messages=[*messages, back, result], tools=[WEATHER])
        assert answer.choices[0].message.content == "rain"


def test_the_client_understands_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake-model", messages=user("a"), top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake-model", messages=user("a"), stream=True, extra_body={"topk": 1})
    assert "did you mean 'top_k'" in str(caught.value)
    stream = client.chat.completions.create(model="fake-model", messages=user("say:ab\x01cd"), stream=True)
    with pytest.raises(openai.APIError):
        list(stream)


def test_who_leaves_a_stream_frees_its_place(template):
    with ServedApp(slow=True, chat_template=template) as server, make_client(server.url) as client:
        stream = client.chat.completions.create(model="fake-model", messages=user("abc"), stream=True)
        next(iter(stream))
        stream.close()
        server.wait_until(lambda: server.stats.num_running == 0, "the abort")


SAID = [
    "abc",
    "say:hé🙂llo",
    "say:<think>\nwell\n</think>\n\nyes",
    f"say:{CALL}",
    f"say:Ä moment.{CALL}\n{CALL}",
    f"say:<think>which?</think>{CALL}",
    "say:a <tool_call> is nothing",
    "say:<tool_call>\n{broken",
    "say:<think>never done",
    "say:",
]
WAYS = [
    {},
    {"n": 2, "logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "stop": ["ll", "me"]},
    {"max_tokens": 9, "logprobs": True},
    {"stream_interval": 4, "separate_reasoning": False},
    {"tool_choice": "none"},
]


@pytest.mark.parametrize(("said", "how"), itertools.product(SAID, WAYS))
def test_a_stream_says_what_the_whole_answer_says(app: App, said, how):
    body = {"seed": 5, "max_tokens": 80, "tools": [WEATHER], **how}
    whole = ask(app, said, **body)
    found = chunks(app, said, **body, stream_options={"include_usage": True})
    assert joined_messages(found) == [_without_ids(one) for one in whole["choices"]]
    used, told = found[-1]["usage"], whole["usage"]
    assert {**used, "prompt_tokens_details": None} == {**told, "prompt_tokens_details": None}


def test_an_output_that_ends_while_its_chunks_are_sent_ends_once(app: App, monkeypatch):
    updates = Run.updates

    async def ended_before_the_first(self, interval=None):
        found = [output async for output in updates(self, interval)]
        for output in found * 2:
            yield output

    body = {"n": 2, "seed": 5, "max_tokens": 9, "logprobs": True}
    whole = ask(app, "abc", **body)["choices"]
    monkeypatch.setattr(Run, "updates", ended_before_the_first)
    assert joined_messages(chunks(app, "abc", **body)) == [_without_ids(one) for one in whole]


def test_what_an_output_gets_while_its_first_chunk_is_sent_comes_with_the_next_ones(app: App, monkeypatch):
    updates, so_far, later = Run.updates, StreamUsage.so_far, []

    async def grown_after_the_first(self, interval=None):
        *_, output = [output async for output in updates(self, interval)]
        text, token_ids, finish = output.text, output.token_ids, output.finish
        output.text, output.token_ids, output.finish = text[:2], token_ids[:2], None

        def grow():
            output.text, output.token_ids, output.finish = text, token_ids, finish

        later.append(grow)
        yield output
        yield output

    def so_far_and_grow(self, *args):
        if later:
            later.pop()()
        return so_far(self, *args)

    body = {"seed": 5, "max_tokens": 9}
    whole = ask(app, "abc", **body)["choices"]
    monkeypatch.setattr(Run, "updates", grown_after_the_first)
    monkeypatch.setattr(StreamUsage, "so_far", so_far_and_grow)
    assert joined_messages(chunks(app, "abc", **body)) == [_without_ids(one) for one in whole]


def _without_ids(one: dict) -> dict:
    """As `joined_messages` has a stream's: what is null does not come there."""
    message = {name: value for name, value in one["message"].items() if value is not None or name == "refusal"}
    if "tool_calls" in message:
        message["tool_calls"] = [{"function": call["function"]} for call in message["tool_calls"]]
    return one | {"message": message | {"content": message.get("content", "")}}


def test_reasoning_is_told_apart_and_counted(app: App):
    said = "say:<think>hm</think>yes"
    answer = ask(app, said)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("hm", "hm", "yes")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")
    whole = choice(app, said, separate_reasoning=False)["message"]
    assert whole["content"] == "<think>hm</think>yes"
    assert whole["reasoning_content"] is None


def test_audio_is_refused_with_the_reason(app: App):
    part = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    for path, field, name in ((PATH, "messages", "messages"), ("/v1/responses", "input", "input")):
        error = app.post(path, **{field: [{"role": "user", "content": [part]}]}).json()["error"]
        assert error["param"] == f"{name}[0].content[0].type"
        assert "audio is not supported" in error["message"]


def test_what_an_answer_does_not_have_is_null(app: App):
    message = choice(app, "say:yes")["message"]
    assert message == {
        "role": "assistant", "content": "yes", "refusal": None, "reasoning_content": None, "reasoning": None,
        "tool_calls": None,
    }  # fmt: skip
    message = choice(app, f"say:{CALL}", tools=[WEATHER])["message"]
    assert (message["content"], message["reasoning_content"]) == (None, None)
    message = choice(app, "say:<think>hm</think>yes")["message"]
    assert (message["reasoning_content"], message["tool_calls"]) == ("hm", None)


def test_every_delta_of_a_model_that_thinks_has_its_reasoning_or_null(app: App):
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(app, f"say:<think>hm</think>yes{CALL}", tools=[WEATHER])]
    assert "".join(delta["reasoning_content"] or "" for delta in deltas) == "hm"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert all(delta["reasoning_content"] is None for delta in deltas if "content" in delta or "tool_calls" in delta)


def test_calls_have_ids_of_their_own(app: App):
    ids = [
        call["id"]
        for _ in range(3)
        for call in choice(app, f"say:{CALL}{CALL}", tools=[WEATHER])["message"]["tool_calls"]
    ]
    assert len(set(ids)) == 6
    found = chunks(app, f"say:{CALL}{CALL}", tools=[WEATHER])
    starts = [
        call
        for chunk in found
        for one in chunk["choices"]
        for call in one["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert [call["index"] for call in starts] == [0, 1]
    assert len({call["id"] for call in starts}) == 2
    assert {call["type"] for call in starts} == {"function"}


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"tool_choice": "required"}, {"weather", "clock"}),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, {"clock"}),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "clock"}}],
                    },
                }
            },
            {"clock"},
        ),
    ],
)
def test_a_choice_of_tool_is_kept(app: App, how, names):
    clock = {"type": "function", "function": {"name": "clock"}}
    for seed in range(4):
        one = choice(app, "abc", tools=[WEATHER, clock], seed=seed, parallel_tool_calls=False, max_tokens=300, **how)
        [call] = one["message"]["tool_calls"]
        assert call["function"]["name"] in names
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert one["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("said", ["say:hé🙂llo", f"say:{CALL}", "say:<think>ä</think>b", "say:abc<eos>"])
def test_logprobs_have_the_real_bytes_of_all_tokens(app: App, said):
    one = choice(app, said, tools=[WEATHER], logprobs=True, seed=1, top_logprobs=3)
    content = one["logprobs"]["content"]
    text = said.removeprefix("say:").encode()
    end = content.pop()
    assert b"".join(bytes(token["bytes"]) for token in content) == text
    assert end["token"] == "<eos>"
    for token in content:
        assert len(token["top_logprobs"]) == 3
        plain = bytes(token["bytes"]).decode(errors="replace")
        assert token["token"] == plain or token["token"].startswith("bytes:\\x")


def test_logprobs_are_those_of_generate(app: App):
    content = choice(app, "abc", seed=3, max_tokens=9, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    meta = app.generate(
        text="abc", sampling_params={"seed": 3, "max_new_tokens": 9}, return_logprob=True, top_logprobs_num=2
    )["meta_info"]
    told = [(token["logprob"], *token["bytes"]) for token in content]
    assert told == [(value, token) for value, token, _ in meta["output_token_logprobs"]]
    for token, tops in zip(content, meta["output_top_logprobs"], strict=True):
        assert [(one["logprob"], one["bytes"]) for one in token["top_logprobs"]] == [
            (value, list(b"<eos>" if top == 256 else b"<bos>" if top == 257 else bytes([top])))
            for value, top, _ in tops
        ]


def test_an_answer_goes_to_the_context_end_unless_bounded(app: App):
    said = "a" * (CONTEXT_LEN - 30)
    assert ask(app, said)["usage"]["completion_tokens"] == 30
    assert ask(app, said, max_tokens=None)["usage"]["completion_tokens"] == 30
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        assert ask(app, said, **{name: -1})["usage"]["completion_tokens"] == 30, "as LM Studio's clients send it"
        assert ask(app, said, **{name: 5})["usage"]["completion_tokens"] == 5
        assert ask(app, said, **{name: 5})["choices"][0]["finish_reason"] == "length"
        error = refusal(app, said, **{name: 31})
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert ask(app, said, max_tokens=5, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
    assert refusal(app, max_tokens=1, max_completion_tokens=2)["param"] in ("max_tokens", "max_completion_tokens")


@pytest.fixture(scope="module")
def echoing(tmp_path_factory):
    """An application whose prompts are what the template was given, as JSON."""
    file = tmp_path_factory.mktemp("templates") / "json.jinja"
    file.write_text(AS_JSON)
    with App(chat_template=str(file)) as running:
        running.asked = _watched(running)
        yield running


def _watched(app: App) -> list:
    """What is asked of the engine from now on."""
    asked, generate = [], app.client.generate

    def noting(request, *args):
        asked.append(request)
        return generate(request, *args)

    app.client.generate = noting
    return asked


def rendered(echoing: App, messages, **body):
    response = echoing.post(PATH, messages=messages, max_tokens=1, **body)
    assert response.status_code == 200, response.text
    *lines, tools, extra = bytes(echoing.asked[-1].token_ids).decode().split("\n")
    return [json.loads(line) for line in lines], json.loads(tools), extra


def test_templates_read_messages_as_they_were_sent(echoing):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hey"}, {"type": "text", "text": "you"}], "name": "Eve"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "Thanks"},
    ]
    found, tools, _ = rendered(echoing, messages, tools=[WEATHER])
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "user"]
    assert [message["content"] for message in found] == ["Be short.", "Hey\nyou", "", "rain", "Thanks"]
    assert found[1]["name"] == "Eve"
    assert found[2]["reasoning_content"] == "hm"
    del messages[2]["reasoning_content"]
    assert (
        rendered(echoing, [*messages[:2], messages[2] | {"reasoning": "hm"}, *messages[3:]], tools=[WEATHER])[0]
        == found
    )
    assert found[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert found[3]["tool_call_id"] == "c1"
    assert tools[0]["function"]["name"] == "weather"
    assert tools[0]["function"]["parameters"] == WEATHER["function"]["parameters"]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


PDF = f"data:application/pdf;base64,{_base64(b'%PDF-1.7 ' + bytes([0xE2, 0xE3, 0xFF]))}"
ASCII_PDF = b"%PDF-1.4 obj"
TEXT_FILE = f"data:text/plain;base64,{_base64(b'K' + 'öln'.encode() + bytes([10]))}"


def test_a_pdf_of_ascii_is_not_read_as_text(echoing):
    for data in (
        _base64(ASCII_PDF),
        f"data:text/plain;base64,{_base64(ASCII_PDF)}",
        "data:application/pdf;base64,QQ==",
    ):
        part = {"type": "file", "file": {"file_data": data}}
        answer = echoing.post(PATH, messages=[{"role": "user", "content": [part]}])
        assert answer.status_code == 400
        assert "does not read PDFs; send their text as a part of type text" in answer.json()["error"]["message"]
        items = [{"role": "user", "content": [{"type": "input_file", "file_data": data}]}]
        error = echoing.post("/v1/responses", input=items).json()["error"]
        assert error["param"] == "input[0].content[0].file_data"
        assert "as a part of type input_text" in error["message"]


def test_text_files_and_earlier_refusals_are_read_as_text(echoing):
    for file, text in (
        ({"file_data": TEXT_FILE, "filename": "a.txt"}, "a.txt:\nKöln\n"),
        ({"file_data": _base64(b"x")}, "x"),
    ):
        parts = [{"type": "text", "text": "Read:"}, {"type": "file", "file": file}]
        [message], _, _ = rendered(echoing, [{"role": "user", "content": parts}])
        assert message["content"] == f"Read:\n{text}"
        items = [{"role": "user", "content": [{"type": "input_file", **file}]}]
        response = echoing.post("/v1/responses", input=items, max_output_tokens=1)
        assert response.status_code == 200, response.text
        [line, *_] = bytes(echoing.asked[-1].token_ids).decode().split("\n")
        assert json.loads(line)["content"] == text
    for refused in (
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
        {"refusal": "No."},
    ):
        messages, _, _ = rendered(echoing, [*user("a"), {"role": "assistant", **refused}, *user("b")])
        assert messages[1]["content"] == "No."
    both, _, _ = rendered(echoing, [{"role": "assistant", "content": "Well.", "refusal": "No."}, *user("b")])
    assert both[0]["content"] == "Well.\nNo."


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        *((blank, {}) for blank in (None, "", " \n", "null", " null ")),
        *((text, text) for text in ("[]", '"x"', "5", '{"city": "K', "not JSON", '{"a": 1} {}', "[" * 1500)),
    ],
)
def test_earlier_calls_whose_arguments_are_no_object_do_not_end_the_conversation(echoing, sent, read):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": sent}}
    [message, *_], _, _ = rendered(echoing, [{"role": "assistant", "tool_calls": [call]}, *user("Go on.")])
    assert message["tool_calls"][0]["function"]["arguments"] == read
    items = [{"type": "function_call", "call_id": "c1", "name": "weather", "arguments": sent}, *user("Go on.")]
    response = echoing.post("/v1/responses", input=items, max_output_tokens=1)
    assert response.status_code == 200, response.text
    [line, *_] = bytes(echoing.asked[-1].token_ids).decode().split("\n")
    assert json.loads(line)["tool_calls"][0]["function"]["arguments"] == read


def test_arguments_of_earlier_calls_may_be_absent(echoing):
    call = {"id": "c1", "type": "function", "function": {"name": "weather"}}
    [message, *_], _, _ = rendered(echoing, [{"role": "assistant", "tool_calls": [call]}, *user("Go on.")])
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    items = [{"type": "function_call", "call_id": "c1", "name": "weather"}, *user("Go on.")]
    assert echoing.post("/v1/responses", input=items, max_output_tokens=1).status_code == 200
    block = {"type": "tool_use", "id": "c1", "name": "weather", "input": None}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
    talk = [*user("a"), {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert echoing.post("/v1/messages", model="default", messages=talk, max_tokens=1).status_code == 200


def test_a_chat_with_functions_in_the_old_form_continues(echoing):
    call = {"name": "weather", "arguments": '{"city": "K"}'}
    result = {"role": "function", "name": "weather", "content": "rain"}
    messages = [*user("a"), {"role": "assistant", "content": None, "function_call": call}, result]
    found, _, _ = rendered(echoing, messages)
    [asked] = found[1]["tool_calls"]
    assert asked["function"] == {"name": "weather", "arguments": {"city": "K"}}
    assert found[2] == {"role": "tool", "name": "weather", "content": "rain", "tool_call_id": asked["id"]}


def test_speech_of_an_earlier_answer_is_reported(echoing):
    messages = [*user("a"), {"role": "assistant", "audio": {"id": "audio_1"}}, *user("b")]
    answer = echoing.post(PATH, messages=messages, max_tokens=1)
    assert (answer.status_code, answer.headers["x-tureen-ignored"]) == (200, "messages[1].audio")


def test_templates_read_what_is_given_for_them(echoing):
    assert rendered(echoing, user("a"), chat_template_kwargs={"extra": "more"})[2] == "more"


TOO_MUCH = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(129)]
BAD_MESSAGES = [
    ([], "messages"),
    ("hello", "messages"),
    ([{"role": "robot", "content": "a"}], "messages[0].role"),
    ([{"role": "function", "content": "a"}], "messages[0].name"),
    ([{"role": "user", "content": "a", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ([{"content": "a"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": "a", "contnet": "b"}], "messages[0]"),
    ([{"role": "user", "content": "a", "tool_call_id": "x"}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "a", "reasoning_content": "x"}], "messages[0].reasoning_content"),
    ([{"role": "user", "content": "a", "reasoning": "x"}], "messages[0].reasoning"),
    ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0]"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "x"}]}],
        "messages[0].content[0].image_url",
    ),
    ([{"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "a", "refusal": "no"}], "messages[0].refusal"),
    ([{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}], "messages[0].content[0].file"),
    (
        [{"role": "user", "content": [{"type": "file", "file": {"file_data": PDF}}]}],
        "messages[0].content[0].file.file_data",
    ),
    ([{"role": "user", "content": "a", "audio": {"id": "x"}}], "messages[0].audio"),
    (
        [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "user", "content": "a", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]}],
        None,
    ),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_a_message_that_cannot_be_is_refused_by_name(app: App, messages, param):
    error = refusal(app, None, messages=messages)
    assert error["param"].startswith(param or "messages[0].tool_calls")


def test_errors_say_what_would_be_right(app: App):
    error = refusal(app, None, messages=[{"role": "robot", "content": "a"}])
    assert all(f"'{role}'" in error["message"] for role in ("system", "developer", "user", "assistant", "tool"))
    error = refusal(app, None, messages=[{"role": "user", "contnet": "a"}])
    assert (error["param"], error["code"]) == ("messages[0].contnet", "unknown_parameter")
    assert "did you mean 'content'" in error["message"]
    error = refusal(app, stream=True, stream_options={"includeusage": True})
    assert "did you mean 'include_usage'" in error["message"]


def test_pictures_are_refused_by_a_model_that_sees_nothing(app: App):
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    assert refusal(app, None, messages=user(parts))["param"].startswith("messages")


def test_pictures_are_shown_where_they_stand(template):
    settings = {"model_type": "clip_vision_model", **tiny_llava.CLIP}
    model = {"model_type": "llava", "vision_config": settings, "text_config": {}, "image_token_index": VOCAB_SIZE}
    loader = MediaLoader(model, tiny_llava.PREPROCESSORS["llava-clip"], media_path=None, allowed_domains=())
    file = io.BytesIO()
    Image.effect_noise((28, 28), 50).convert("RGB").save(file, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    with App(media=loader, special=("<image>",), chat_template=template) as app:
        asked = _watched(app)
        text, dots = {"type": "text", "text": "look"}, {"type": "text", "text": "..."}
        for shown in (picture, {"url": picture}, {"url": picture, "detail": "high"}):
            ask(app, None, messages=user([text, {"type": "image_url", "image_url": shown}, dots]), max_tokens=1)
        app.generate(text="look\n<image>\n...", image_data=[picture], sampling_params={"max_new_tokens": 1})
        assert len(asked) == 4
        assert len({request.token_ids for request in asked}) == 1
        assert all(min(request.token_ids) < 0 and request.media for request in asked)
        parts = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
        assert app.post(PATH, messages=user(parts)).status_code in (400, 403)
        app.check_idle()


@pytest.mark.parametrize("name", [name for name in TABLE.refused if "*" not in name])
def test_what_there_is_not_is_refused_by_name_unless_it_asks_for_nothing(app: App, name):
    nothing, _ = TABLE.refused[name]
    error = refusal(app, **{name: "something"})
    assert error["param"] == name
    assert error["code"] == ("chat_template_not_allowed" if name == "chat_template" else "not_available")
    assert choice(app, "say:a", **{name: nothing})["message"]["content"] == "a"


def test_a_template_of_the_request_is_refused_wherever_it_stands(app: App):
    error = refusal(app, chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert (error["param"], error["code"]) == ("chat_template_kwargs.chat_template", "chat_template_not_allowed")


CALLING = {"type": "function", "function": {"name": "weather"}}
BOUNDS = [
    ("logprobs", [True, False], [1, "yes", 129]),
    ("top_logprobs", [-1, 0, 128], [-2, 129, True]),
    ("tools", [[], [WEATHER], TOO_MUCH[1:]], [TOO_MUCH, [WEATHER, WEATHER], [{"type": "x"}], ["a"], {}]),
    ("tool_choice", ["auto", "none"], ["required", "maybe", CALLING, {"type": "custom"}, 3]),
    ("parallel_tool_calls", [True, False], ["no", 1]),
    ("separate_reasoning", [True, False], [0]),
    ("chat_template_kwargs", [{}], ["a", [1]]),
    ("modalities", [["text"]], [["audio"], ["text", "audio"], "text"]),
    ("service_tier", ["auto", "default", "flex"], [1]),
    ("add_generation_prompt", [True], [False]),
    ("max_completion_tokens", [0, 1, 100], [-3, 1.5, "1"]),
    ("response_format", [{"type": "text"}], [{"type": "xml"}, "json_object"]),
    ("n", [1, 4], [0, 129]),
    ("reasoning_effort", [], ["much", 3]),
    ("metadata", [{"a": "b"}], [{"a": {}}]),
]


@pytest.mark.parametrize(("name", "good", "bad"), BOUNDS)
def test_every_field_has_its_bounds(app: App, name, good, bad):
    with_it = {"logprobs": True, "max_tokens": 3}
    for value in [*good, None]:
        ask(app, "say:a", **with_it | {name: value} | ({"max_tokens": None} if name.startswith("max_c") else {}))
    for value in bad:
        error = refusal(app, **{"logprobs": True, name: value})
        assert error["param"].split(".")[0].split("[")[0] == name, (value, error)


def test_the_last_message_is_gone_on_with(app: App):
    messages = [*user("a"), {"role": "assistant", "content": "say:ab"}]
    answer = ask(app, None, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert refusal(app, None, messages=messages, continue_final_message=True, add_generation_prompt=True)["param"] == (
        "add_generation_prompt"
    )


def test_control_tokens_in_messages_are_counted(app: App):
    answer = ask(app, "say:<eos>a<bos>")
    assert answer["choices"][0]["message"]["content"] == "<eos>a<bos>"
    assert answer["metadata"]["neutralised_special_tokens"] == "2"
    assert "neutralised_special_tokens" not in ask(app, "say:a")["metadata"]
    assert chunks(app, "say:<eos>")[-1]["metadata"]["neutralised_special_tokens"] == "1"


def test_a_request_is_aborted_by_its_id_and_says_so(template):
    with ServedApp(slow=True, chat_template=template) as server, make_client(server.url) as client:
        found = iter(client.chat.completions.create(model="fake-model", messages=user("abc"), stream=True))
        httpx.post(f"{server.url}/abort_request", json={"rid": next(found).id})
        assert [chunk.choices[0].finish_reason for chunk in found][-1] == "abort"


def test_nothing_is_left_behind(app: App):
    app.check_idle()
