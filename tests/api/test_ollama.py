"""Ollama's API: `/api/chat`, `/api/generate` and what is around them; its own client reads the answers."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import httpx
import msgspec
import ollama
import pytest
from app_under_test import App
from embedding_engine import MAX_TOKENS, make_embedding_engine
from fake_engine import CONTEXT_LEN, HIDDEN_SIZE
from served_app import ServedApp
from timeouts import PATIENCE_S

from tureen.dialects.ollama.body import (
    TABLES,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from tureen.dialects.ollama.conversation import OllamaConversation

TEMPLATE = (
    "{# <tool_call> <think> #}{% if enable_thinking is defined %}{{ 'yes' if enable_thinking else 'no' }}"
    "{% endif %}{{ '' if tools }}{{ messages[-1]['content'] }}"
)
"""The model is sent what was said last, and answers as fake_engine.py says. It knows tools and can be told to think."""

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


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
def server(template):
    with ServedApp(chat_template=template) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    one = ollama.Client(host=server.url, timeout=PATIENCE_S)
    yield one
    one._client.close()


def user(content, **more) -> list[dict]:
    return [{"role": "user", "content": content, **more}]


def post(app: App, path: str, status: int, body: dict) -> httpx.Response:
    response = app.request("POST", path, json={"model": "fake-model", **body})
    assert response.status_code == status, response.text
    return response


def chat(app: App, said="say:hi", status: int = 200, **body):
    return post(app, "/api/chat", status, {"messages": user(said), "stream": False} | body).json()


def generate(app: App, prompt="say:hi", status: int = 200, **body):
    return post(app, "/api/generate", status, {"prompt": prompt, "stream": False} | body).json()


def refusal(app: App, path: str = "/api/chat", **body) -> str:
    asked = {"messages": user("say:a")} if path == "/api/chat" else {"prompt": "say:a"}
    answer = post(app, path, 400, asked | body).json()
    assert list(answer) == ["error"]
    return answer["error"]


def lines(app: App, path: str, **body) -> list[dict]:
    response = post(app, path, 200, body)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_shortest_chat(app: App):
    answer = chat(app, "say:héllo")
    assert answer["message"] == {"role": "assistant", "content": "héllo"}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("fake-model", True, "stop")
    assert answer["prompt_eval_count"] == len("say:héllo".encode())
    assert answer["eval_count"] == len("héllo".encode()) + 1


def test_the_shortest_prompt(app: App):
    answer = generate(app, "say:héllo")
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("héllo", True, "stop")


def test_durations_are_nanoseconds_that_add_up(template):
    with App(chat_template=template, slow=True) as app:
        answer = chat(app, "abc", options={"num_predict": 20})
        assert all(isinstance(answer[name], int) for name in DURATIONS)
        assert answer["total_duration"] >= 200_000_000  # twenty steps of ten milliseconds
        parts = answer["load_duration"] + answer["prompt_eval_duration"] + answer["eval_duration"]
        assert parts == pytest.approx(answer["total_duration"], rel=1e-6)
        assert 0 < answer["prompt_eval_duration"] < answer["eval_duration"]


STREAMED = [
    ("say:héllo wörld", {}),
    ("say:<think>hm, 你好</think>\n\nyes", {}),
    (f"say:let me see {CALL}", {"tools": [WEATHER]}),
    (f"say:<think>call it</think>{CALL}\n{CALL} done", {"tools": [WEATHER]}),
    (f"say:{CALL}", {"tools": [WEATHER], "options": {"num_predict": 66}}),
    ("abc", {"options": {"num_predict": 30, "seed": 3}}),
    ("say:", {}),
]


def _joined(pieces: list[dict]) -> dict:
    message = {"role": "assistant", "content": "".join(piece["message"]["content"] for piece in pieces)}
    thinking = "".join(piece["message"].get("thinking", "") for piece in pieces)
    calls = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    return message | ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})


def _without_ids(message: dict) -> dict:
    return message | (
        {"tool_calls": [one["function"] for one in message["tool_calls"]]} if "tool_calls" in message else {}
    )


@pytest.mark.parametrize(("said", "fields"), STREAMED)
def test_a_joined_stream_is_the_whole_answer(app: App, client, said, fields):
    whole = chat(app, said, **fields)
    pieces = lines(app, "/api/chat", messages=user(said), **fields)
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert _without_ids(_joined(pieces)) == _without_ids(whole["message"])
    assert pieces[-1]["message"] == {"role": "assistant", "content": ""}
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert pieces[-1][name] == whole[name]
    read = list(client.chat(model="fake-model", messages=user(said), stream=True, **fields))
    assert "".join(piece.message.content or "" for piece in read) == whole["message"]["content"]
    calls = [call for piece in read for call in piece.message.tool_calls or ()]
    expected = [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert [(one.function.name, one.function.arguments) for one in calls] == [
        (one["name"], one["arguments"]) for one in expected
    ]


def test_streams_are_the_default(app: App):
    pieces = lines(app, "/api/generate", prompt="say:<think>hm</think>hello")
    assert "".join(piece["response"] for piece in pieces) == "hello"
    assert "".join(piece.get("thinking", "") for piece in pieces) == "hm"
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_calls_of_tools_are_objects(app: App):
    message = chat(app, f"say:{CALL}\n{CALL}", tools=[WEATHER])["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"index": index, "name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}} for index in range(2)
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_why_an_answer_ended(app: App):
    assert chat(app, "abc", options={"num_predict": 3})["done_reason"] == "length"
    stopped = chat(app, "say:one two", options={"stop": " t"})
    assert (stopped["message"]["content"], stopped["done_reason"]) == ("one", "stop")
    assert generate(app, "say:one two", options={"stop": ["zz", " t"]})["response"] == "one"


def test_an_answer_goes_on_to_the_end_of_the_context_unless_bounded(app: App):
    for options in ({}, {"num_predict": -1}, {"num_predict": -2}):
        answer = chat(app, "abc", options=options)
        assert (answer["done_reason"], answer["eval_count"]) == ("length", CONTEXT_LEN - 3)


def test_options_act(app: App):
    def made(**options) -> str:
        return generate(app, "abc", options={"num_predict": 30, **options})["response"]

    assert made(seed=5) == made(seed=5)
    assert made(seed=5) != made(seed=6)
    assert made(seed=-1) != made(seed=-1)
    assert made(num_ctx=CONTEXT_LEN)
    for options in ({"top_k": 0}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9}, {"repeat_penalty": 1.2}):
        assert made(**options)
    with_penalties = {"presence_penalty": 1.0, "frequency_penalty": -1.0}
    run = app.post("/api/generate", model="fake-model", prompt="say:a", options=with_penalties, stream=False)
    assert run.json()["response"] == "a"


def test_penalties_look_at_64_tokens_unless_told(app: App):
    def window(**options) -> int:
        answer = generate(app, "abc", options={"num_predict": 1, **options}, return_effective=True)
        return answer["effective"]["repeat_last_n"]["value"]

    assert [window(), window(repeat_last_n=-1), window(repeat_last_n=0, repeat_penalty=1.5)] == [64, -1, 0]


def test_formats(app: App):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    assert json.loads(chat(app, "abc", format=schema)["message"]["content"]).keys() == {"a"}
    assert generate(app, "say:{}", format="json")["response"].startswith("{")
    assert generate(app, "say:x", format="")["response"] == "x"
    assert "format" in refusal(app, format="xml")
    assert "format" in refusal(app, format={"type": "nonsense"})


def test_templates_are_told_whether_to_think(app: App):
    assert chat(app, "a", options={"num_predict": 1})["prompt_eval_count"] == len("a")
    for think, said in ((True, "yesa"), (False, "noa")):
        assert chat(app, "a", think=think, options={"num_predict": 1})["prompt_eval_count"] == len(said)
        assert generate(app, "a", think=think, options={"num_predict": 1})["prompt_eval_count"] == len(said)
    assert chat(app, "a", think="high", options={"num_predict": 1})["prompt_eval_count"] == len("yesa")
    assert "think" in refusal(app, think="most")


def test_levels_of_thinking_are_passed_to_templates_that_have_them_and_else_reported(tmp_path):
    for template, told in (("plain", "think"), ("{# <think> #}{{ reasoning_effort }}", None)):
        file = tmp_path / "levels.jinja"
        file.write_text(template)
        with App(chat_template=str(file)) as app:
            body = {"messages": user("a"), "stream": False, "think": "high", "options": {"num_predict": 1}}
            answer = post(app, "/api/chat", 200, body)
            assert answer.headers.get("x-tureen-ignored") == told
            assert answer.json()["prompt_eval_count"] == len("high" if told is None else "plain")


def test_a_raw_prompt_needs_no_template(tmp_path):
    file = tmp_path / "loud.jinja"
    file.write_text("{{ messages | map(attribute='content') | join('+') }}")
    with App(chat_template=str(file)) as app:
        assert generate(app, "hello", raw=True, options={"num_predict": 1})["prompt_eval_count"] == len("hello")
        body = {"system": "be good", "options": {"num_predict": 1}}
        assert generate(app, "hello", **body)["prompt_eval_count"] == len("be good+hello")
        for field, value in (("system", "x"), ("images", ["aGk="]), ("think", True)):
            assert refusal(app, "/api/generate", raw=True, **{field: value}).startswith(field)
        assert generate(app, "say:a b", raw=True, options={"stop": [" "]})["response"] == "a"


def test_a_model_that_is_asked_for_nothing_is_loaded(app: App):
    answer = chat(app, messages=[])
    assert (answer["message"]["content"], answer["done"], answer["done_reason"]) == ("", True, "load")
    answer = generate(app, "", stream=True)
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")


def test_a_conversation_becomes_messages_of_a_chat():
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("one", "two", "one")]
    given = [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "look", "images": ["aGk=", "aGo="]},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "two"},
        {"role": "tool", "content": "1", "tool_name": "one"},
        {"role": "tool", "content": "3"},
    ]
    talk = OllamaConversation()
    for index, one in enumerate(given):
        talk.add(msgspec.convert(one, OllamaMessage), f"messages[{index}]")
    ids = [call["id"] for call in talk.messages[2]["tool_calls"]]
    assert len(set(ids)) == 3
    assert talk.messages[:2] == [
        given[0],
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "look"}]},
    ]
    assert talk.messages[2]["reasoning_content"] == "hm"
    assert [call["function"] for call in talk.messages[2]["tool_calls"]] == [call["function"] for call in calls]
    assert talk.messages[3:] == [
        {"role": "tool", "content": "2", "tool_call_id": ids[1], "name": "two"},
        {"role": "tool", "content": "1", "tool_call_id": ids[0], "name": "one"},
        {"role": "tool", "content": "3", "tool_call_id": ids[2], "name": "one"},
    ]
    assert talk.pictures == ["aGk=", "aGo="]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/api/chat", {"messages": user("a", tool_name="x")}, "messages[0].tool_name"),
        ("/api/chat", {"messages": user("a", images=["aGk="])}, "messages"),
        ("/api/chat", {"messages": None, "prompt": "x"}, "prompt"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("/api/chat", {"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ("/api/chat", {"stream": 1}, "stream"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"options": {"top_p": 0}}, "options.top_p"),
        ("/api/chat", {"options": {"top_k": -2}}, "options.top_k"),
        ("/api/chat", {"options": {"min_p": 2}}, "options.min_p"),
        ("/api/chat", {"options": {"typical_p": 0}}, "options.typical_p"),
        ("/api/chat", {"options": {"repeat_penalty": 3}}, "options.repeat_penalty"),
        ("/api/chat", {"options": {"presence_penalty": 3}}, "options.presence_penalty"),
        ("/api/chat", {"options": {"frequency_penalty": -3}}, "options.frequency_penalty"),
        ("/api/chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("/api/chat", {"options": {"num_predict": CONTEXT_LEN}}, "options.num_predict"),
        ("/api/chat", {"options": {"num_ctx": 0}}, "options.num_ctx"),
        ("/api/chat", {"options": {"seed": 0.5}}, "options.seed"),
        ("/api/chat", {"options": {"stop": [""]}}, "options.stop"),
        ("/api/chat", {"options": {"temprature": 1}}, "did you mean 'temperature'"),
        ("/api/chat", {"options": 5}, "options"),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive"),
        ("/api/generate", {"prompt": 5}, "prompt"),
        ("/api/generate", {"promt": "x"}, "did you mean 'prompt'"),
        ("/api/generate", {"images": ["aGk="]}, "prompt"),
        ("/api/generate", {"tools": [WEATHER]}, "tools"),
        ("/api/generate", {"temperature": 0.5}, 'send "options": {"temperature": …}'),
        ("/api/generate", {"max_tokens": 5}, 'send "options": {"num_predict": …}'),
        ("/api/generate", {"prompt": "x" * (CONTEXT_LEN + 1)}, "longer than the model's context"),
    ],
)
def test_what_is_wrong_is_refused_by_name(app: App, path, fields, named):
    assert named in refusal(app, path, **fields)


@pytest.mark.parametrize("name", TABLES["body"].refused)
def test_what_is_not_offered_is_refused_by_name_unless_it_asks_for_nothing(app: App, name):
    for path in ("/api/chat", "/api/generate"):
        assert refusal(app, path, **{name: 7}).startswith(f"{name} is not available: ")
    assert generate(app, "say:a", **{name: TABLES["body"].refused[name][0]})["response"] == "a"


@pytest.mark.parametrize("name", TABLES["options"].refused)
def test_options_that_are_not_offered_are_refused_by_name_unless_they_ask_for_nothing(app: App, name):
    assert refusal(app, options={name: 7}).startswith(f"options.{name} is not available: ")
    assert generate(app, "say:a", options={name: TABLES["options"].refused[name][0]})["response"] == "a"


def test_null_is_the_default_of_every_field(app: App):
    nulls = dict.fromkeys(set(OllamaGenerateBody.__struct_fields__) - {"model", "prompt", "stream"})
    options = dict.fromkeys(OllamaOptions.__struct_fields__)
    assert generate(app, "say:a", **nulls)["response"] == "a"
    assert generate(app, "say:a", options=options, keep_alive="5m")["response"] == "a"
    assert generate(app, "say:a", keep_alive=-1)["response"] == "a"


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/api/chat", {"messages": user("say:a", name="x")}, "messages[0].name"),
        ("/api/chat", {"messages": [], "model": "other"}, "model"),
        ("/api/generate", {"options": {"num_ctx": CONTEXT_LEN + 1}}, "options.num_ctx"),
        ("/api/generate", {"options": {"num_gpu": 1, "zebra": 2}}, "options.num_gpu, options.zebra"),
        ("/api/generate", {"options": {"num_keep": 24, "mirostat_tau": 5.0}}, "options.num_keep, options.mirostat_tau"),
        ("/api/generate", {"user": "me", "stream_options": {}}, "user, stream_options"),
        ("/api/generate", {"keep_alive": 0}, "keep_alive"),
        ("/api/generate", {"keep_alive": "0s"}, "keep_alive"),
    ],
)
def test_what_cannot_change_the_answer_is_told(app: App, path, fields, told):
    said = {"/api/chat": {"messages": user("say:a")}, "/api/generate": {"prompt": "say:a"}}[path]
    answer = post(app, path, 200, said | {"stream": False} | fields)
    assert answer.headers["x-tureen-ignored"] == told
    assert answer.json()["ignored_fields"] == told.split(", ")


def test_the_model_is_missing_where_it_is_null(app: App):
    assert "model" in refusal(app, model=None)


def test_what_is_served(client):
    [model] = client.list().models
    assert model.model == "fake-model"
    assert len(model.digest) == 64
    assert model.modified_at is not None
    shown = client.show("fake-model")
    assert shown.modelinfo["fake.context_length"] == CONTEXT_LEN
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert client.show("fake-model:latest").details.family == "fake"
    assert client.show("other").details.family == "fake"


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "nonsense"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", {"messages": user("say:hi")}), ("/api/generate", {"prompt": "say:hi"}), ("/api/show", {})],
)
def test_a_body_is_json_whatever_its_content_type_says(app: App, kind, path, body):
    """curl's own type is that of a form; LiteLLM, its proxy and google-adk send none."""
    content = json.dumps({"model": "fake-model"} | ({} if path == "/api/show" else {"stream": False}) | body).encode()
    headers = {} if kind is None else {"content-type": kind}
    answer = app.request("POST", path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/pull", 404),
        ("GET", "/api/nothing/there", 404),
        ("DELETE", "/api/delete", 404),
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
    ],
)
def test_what_is_not_there_is_an_error_in_the_api_s_form(app: App, method, path, status):
    answer = app.request(method, path)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert path in answer.json()["error"] or answer.headers["allow"] in answer.json()["error"]
    assert app.request("GET", "/apiary").json()["error"]["code"] == "unknown_route"


FILES = (("config.json", 7, 5 * 10**18), ("a.gguf", 2_000_000_000, 17 * 10**17), ("b.gguf", 10, 16 * 10**17))


@pytest.mark.parametrize(("count", "shown"), [(8_030_261_248, "8.0B"), (134_515_008, "134.52M"), (0, "")])
def test_models_have_the_size_the_format_and_the_parameters_of_their_files(template, count, shown):
    facts = {"files": FILES, "num_parameters": count, "quantization": "Q4_K_M", "device": "cuda:0"}
    with ServedApp(chat_template=template, facts=facts) as server:
        one = ollama.Client(host=server.url, timeout=PATIENCE_S)
        [listed], [running], described = one.list().models, one.ps().models, one.show("fake-model")
        one._client.close()
    assert listed.size == running.size == running.size_vram == 2_000_000_017
    assert running.context_length == CONTEXT_LEN
    assert listed.modified_at == described.modified_at == datetime.fromtimestamp(17 * 10**8, UTC)
    for details in (listed.details, running.details, described.details):
        assert (details.format, details.parameter_size, details.quantization_level) == ("gguf", shown, "Q4_K_M")
    assert described.modelinfo.get("general.parameter_count") == (count or None)
    with App(facts=facts | {"device": "cpu"}) as app:
        [card] = app.request("GET", "/api/ps").json()["models"]
        assert (card["size"], card["size_vram"]) == (2_000_000_017, 0)


@pytest.fixture(scope="module")
def embedder():
    with App(factory=make_embedding_engine) as running:
        yield running


def test_an_embedding_model_is_listed_and_shown_with_what_it_can_do(embedder):
    shown = embedder.post("/api/show", model="default").json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["fake.embedding_length"] == 4
    [card] = embedder.request("GET", "/api/tags").json()["models"]
    assert card["name"] == "fake-embedder"
    assert "generates no text" in embedder.post("/api/generate", model="default", prompt="a").json()["error"]


def test_embeddings_are_scaled_to_length_one_and_those_of_the_older_route_are_not(embedder):
    """The model counts letters, so its embeddings are known."""
    many = embedder.post("/api/embed", model="default", input=["aab", "dddd"]).json()
    fifth = 5**-0.5
    assert many["embeddings"] == [pytest.approx([2 * fifth, fifth, 0, 0]), [0, 0, 0, 1]]
    assert (many["model"], many["prompt_eval_count"], many["load_duration"]) == ("default", 7, 0)
    assert many["total_duration"] > 0
    one = embedder.post("/api/embed", model="default", input="aab").json()
    assert one["embeddings"] == many["embeddings"][:1]
    assert embedder.post("/api/embeddings", model="default", prompt="aab").json() == {"embedding": [2, 1, 0, 0]}
    for path, empty, answer in (("embed", {"input": []}, "embeddings"), ("embeddings", {"prompt": ""}, "embedding")):
        assert embedder.post(f"/api/{path}", model="default", **empty).json()[answer] == []


def test_ollama_s_client_reads_the_embeddings_of_a_model_that_generates(client):
    read = client.embed(model="fake-model", input=["a", "b"], options={"num_ctx": 8}, keep_alive="5m")
    assert [len(vector) for vector in read.embeddings] == [HIDDEN_SIZE] * 2
    assert len(client.embeddings(model="fake-model", prompt="a").embedding) == HIDDEN_SIZE


def test_a_text_that_is_too_long_loses_its_end_unless_the_client_forbids_it(embedder):
    long = "a" * MAX_TOKENS + "b"
    cut = embedder.post("/api/embed", model="default", input=long).json()
    assert (cut["embeddings"], cut["prompt_eval_count"]) == ([[1, 0, 0, 0]], MAX_TOKENS)
    refused = embedder.post("/api/embed", model="default", input=long, truncate=False)
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    for wrong in ({"input": ["a", ""]}, {"input": 5}, {"dimensions": 3}, {"keep_alive": "soon"}, {"model": None}):
        refused = embedder.post("/api/embed", **({"model": "default", "input": "a"} | wrong))
        assert refused.status_code == 400
        assert next(iter(wrong)) in refused.json()["error"]


def test_options_about_generating_are_told_of_an_embedding(embedder):
    """LangChain sends all options of its chat models."""
    options = {"temperature": 0.1, "mirostat": 2, "num_ctx": 8, "num_gpu": 1, "zebra": 1}
    answer = embedder.post("/api/embed", model="default", input="a", options=options, user="me")
    told = ["options.temperature", "options.mirostat", "options.num_gpu", "options.zebra", "user"]
    assert (answer.status_code, set(answer.json()["ignored_fields"])) == (200, set(told)), answer.text


LOGPROBS = {"logprobs": True, "top_logprobs": 3, "options": {"num_predict": 6, "seed": 3, "temperature": 0.5}}


def test_log_probabilities_are_the_model_s_own_whole_and_streamed(client, app: App):
    meta = app.generate(
        text="abc",
        sampling_params={"max_new_tokens": 6, "seed": 3, "temperature": 0.5, "top_k": 40, "top_p": 0.9},
        return_logprob=True,
        top_logprobs_num=3,
        logprobs_mode="raw",
    )["meta_info"]
    text = app.state.context.tokenizer.token_text
    expected = [(value, text(token)) for value, token, _ in meta["output_token_logprobs"]]
    best = [[(value, text(token)) for value, token, _ in position] for position in meta["output_top_logprobs"]]
    whole = chat(app, "abc", **LOGPROBS)["logprobs"]
    assert [(entry["logprob"], entry["token"]) for entry in whole] == expected
    assert [[(one["logprob"], one["token"]) for one in entry["top_logprobs"]] for entry in whole] == best
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in whole)
    assert generate(app, "abc", **LOGPROBS)["logprobs"] == whole
    assert generate(app, "abc", raw=True, **LOGPROBS)["logprobs"] == whole
    read = [
        entry
        for piece in client.chat(model="m", messages=user("abc"), stream=True, **LOGPROBS)
        for entry in piece.logprobs or ()
    ]
    assert [(entry.logprob, entry.token) for entry in read] == expected
    assert "logprobs" not in chat(app, "abc", options={"num_predict": 2})
    assert "top_logprobs" not in chat(app, "abc", options={"num_predict": 1}, logprobs=True)["logprobs"][0]


def test_alternatives_need_log_probabilities(app: App):
    assert refusal(app, top_logprobs=2) == "top_logprobs needs logprobs: true"
    assert "top_logprobs" in refusal(app, logprobs=True, top_logprobs=21)
    assert generate(app, "say:a", top_logprobs=0)["response"] == "a"


def test_what_show_takes(app: App):
    assert post(app, "/api/show", 200, {"model": None, "name": "fake-model"}).json()["capabilities"]
    assert post(app, "/api/show", 200, {"name": "fake-model"}).json()["capabilities"]
    for body, message in (
        ({"model": None}, "model is missing"),
        ({"name": "x"}, "name is 'x', but model, the same field, is 'fake-model'; send one"),
        ({"modle": "x"}, "modle"),
    ):
        assert message in post(app, "/api/show", 400, body).json()["error"]


def test_the_version_is_one_of_ollama_s(app: App):
    version = app.request("GET", "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 9, 0)


def test_the_server_says_that_it_is_there(app: App):
    assert app.request("GET", "/").text == "Ollama is running"
    assert app.request("HEAD", "/").status_code == 200
    assert app.post("/", inputs="say:a").json() == [{"generated_text": "a"}]


def test_the_client_knows_the_errors(client):
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as refused:
        client.chat(model="fake-model", messages=user("a"), options={"temperature": -1})
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="the model failed"):
        list(client.chat(model="fake-model", messages=user("say:ok\x01a"), stream=True))


def test_a_fault_is_an_error_or_the_last_line_of_a_stream(app: App):
    assert "the model failed" in chat(app, "say:\x01a", status=500)["error"]
    found = lines(app, "/api/chat", messages=user("say:ok\x01a"))
    assert "".join(piece["message"]["content"] for piece in found[:-1]) == "ok\x01"
    assert list(found[-1]) == ["error"]
    app.check_idle()


def test_a_server_that_is_shutting_down_says_when_to_come_again(template):
    with App(chat_template=template) as app:
        app.state.lifecycle.is_draining = True
        for path, asked in (("/api/chat", {"messages": user("a")}), ("/api/generate", {"prompt": "a", "raw": True})):
            response = post(app, path, 503, asked)
            assert "shutting down" in response.json()["error"]
            assert int(response.headers["retry-after"]) > 0


def test_an_api_key_is_asked_for_in_the_api_s_shape(template):
    with App(chat_template=template, api_key="sesame") as app:
        for method, path in (("GET", "/api/tags"), ("POST", "/api/chat")):
            response = app.request(method, path)
            assert response.status_code == 401
            assert "API key" in response.json()["error"]
        headers = {"authorization": "Bearer sesame"}
        assert app.request("GET", "/api/tags", headers=headers).status_code == 200


def test_a_client_that_leaves_ends_its_request(template):
    body = {"model": "fake-model", "messages": user("abc")}
    with ServedApp(chat_template=template, slow=True) as server:
        with httpx.stream("POST", f"{server.url}/api/chat", json=body) as response:
            next(response.iter_bytes())
        server.wait_until(lambda: not server.stats.num_running, "the end of a stream without a reader")
        server.abandon("/api/chat", body | {"stream": False}, lambda: server.stats.num_running)
        server.wait_until(lambda: not server.stats.num_running, "the end of a request whose client left")
