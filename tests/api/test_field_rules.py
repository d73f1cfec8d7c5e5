"""Each field of each API does what the tables say: it is honoured, or told, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from app_under_test import App
from kinds_of_servers import Servers, other_servers
from msgspec import inspect
from one_request import SHORTEST_WITHOUT_OUTPUT
from samples import some

from tureen.app.compat import compat_routes
from tureen.fields.known_options import known_options
from tureen.http.dialect import BodyPart

LAST = "{{ messages[-1]['content'] }}"
"""A template that renders only the last message, so chats end like plain prompts."""

CHAT = [{"role": "user", "content": "say:a"}]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "boolean"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA, PATTERN, GRAMMAR = {"type": "boolean"}, "a|b", 'root ::= "a"'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}

TENSOR = {"name": "input0", "shape": [1, 1], "datatype": "UINT32", "data": [97]}

SHORTEST: dict[str, dict[str, Any]] = {
    "SGLang /generate": {"text": "say:a"},
    "MindIE and vLLM's demo server /generate": {"prompt": "say:a"},
    "TGI /generate": {"inputs": "say:a"},
    "OpenAI /v1/completions": {"prompt": "say:a"},
    "OpenAI /v1/chat/completions": {"messages": CHAT},
    "OpenAI /v1/responses": {"input": "say:a"},
    "Anthropic /v1/messages": {"model": "default", "messages": CHAT, "max_tokens": 50},
    "Anthropic /v1/messages/count_tokens": {"model": "default", "messages": CHAT},
    "Ollama /api/chat": {"model": "default", "messages": CHAT, "stream": False},
    "Ollama /api/generate": {"model": "default", "prompt": "say:a", "stream": False},
    "Ollama /api/embed": {"model": "default", "input": "a"},
    "Ollama /api/embeddings": {"model": "default", "prompt": "a"},
    "OpenAI /v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},  # and the id of a file
    "MindIE /infer": {"inputs": "say:a"},
    "MindIE /v2/models/default/generate": {"text_input": "say:a"},
    "MindIE /v2/models/default/infer": {"inputs": [TENSOR]},
    "vLLM /inference/v1/generate": {"token_ids": [97]},
    "llama.cpp /completion": {"prompt": "say:a"},
    "llama.cpp /infill": {"input_prefix": "a", "input_suffix": "b"},
}
SHORTEST |= SHORTEST_WITHOUT_OUTPUT
LIMITS: dict[str, tuple[str, Any]] = {
    "SGLang /generate": ("sampling_params", {"max_new_tokens": 16}),
    "MindIE": ("parameters", {"max_new_tokens": 16}),
    "MindIE and vLLM's demo server /generate": ("max_tokens", 16),
    "vLLM": ("sampling_params", {"max_tokens": 16}),
    "llama.cpp /completion": ("n_predict", 16),
    "llama.cpp /infill": ("n_predict", 16),
    "TGI": ("parameters", {"max_new_tokens": 16}),
    "OpenAI /v1/completions": ("max_tokens", 16),
    "OpenAI /v1/chat/completions": ("max_tokens", 16),
    "OpenAI /v1/responses": ("max_output_tokens", 16),
    "Ollama /api/chat": ("options", {"num_predict": 16}),
    "Ollama /api/generate": ("options", {"num_predict": 16}),
}
"""What bounds the answer of a route, or of the routes of an API."""

LENGTHS = (
    "max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_new_tokens", "min_tokens",
    "num_predict", "n_predict", "sampling_params", "parameters", "options",
)  # fmt: skip
EXAMPLES: dict[str, Any] = {
    "choice": ["a", "b"],
    "custom_logit_processor": "disallowed_tokens",
    "custom_params": {"token_ids": [5]},
    "deadline_ms": 60_000,
    "dtype": "bool",
    "documents": ["b"],
    "ebnf": GRAMMAR,
    "encoding_format": "base64",
    "format": SCHEMA,
    "grammar": GRAMMAR,
    "grammar_after": "</think>",
    "guided_choice": ["a", "b"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": GRAMMAR,
    "guided_json": SCHEMA,
    "guided_regex": PATTERN,
    "guided_structural_tag": TAG,
    "guided_whitespace_pattern": r"[\n\t ]*",
    "json_schema": SCHEMA,
    "items": ["b"],
    "keep_alive": "5m",
    "label_token_ids": [5],
    "logit_bias": {"5": 1},
    "lora_path": "whisper",
    "messages": CHAT,
    "metadata": {},
    "modalities": ["text"],
    "model": "default",
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_expires_after": {"seconds": 3600},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "parameters.adapter_id": "whisper",
    "parameters.grammar": {"type": "json", "value": SCHEMA},
    "parameters.stop": ["x"],
    "reasoning": {"effort": None},
    "regex": PATTERN,
    "response_format": {"type": "json_object"},
    "sampling_params.custom_params": {"token_ids": [5]},
    "service_tier": "auto",
    "session_params.id": "open",
    "session_params": {"id": "open"},
    "stop": ["x"],
    "stop_regex": ["x+"],
    "stop_sequences": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "structural_tag": TAG,
    "structured_outputs": {"choice": ["a", "b"]},
    "system": "Be brief.",
    "text": {"format": {"type": "text"}},
    "thinking": {"type": "adaptive"},
    "think": None,
    "tool_choice": "none",
    "ttft_deadline_ms": 60_000,
    "tools": TOOLS,
}
"""Values that are taken, of fields of which the type does not tell any."""

EXAMPLES_OF_ROUTES = {
    "Anthropic": {"tools": [{"name": "look", "input_schema": TOOL["parameters"]}], "tool_choice": {"type": "none"}},
    "OpenAI /v1/responses": {"tools": [{"type": "function", **TOOL}], "include": []},
    "OpenAI /v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
    "SGLang": {"text": "a"},
    "SGLang /generate": {"modalities": ["image"], "structural_tag": TAG},
    "llama.cpp": {
        "input_extra": [{"text": "a"}],
        "stop": ["x"],
        "json_schema": SCHEMA,
        "prompt": "say:a",
        "samplers": "k",
    },
    "MindIE /v2/models/default/infer": {"inputs": [TENSOR], "outputs": [{"name": "out"}]},
    "TEI": {"texts": ["b"]},
    "TEI /similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {}},
    "SGLang and vLLM /tokenize": {"add_generation_prompt": True, "reasoning": {}},
}
BESIDE: dict[str, dict[str, Any]] = {
    "custom_params": {"custom_logit_processor": "disallowed_tokens"},
    "sampling_params.custom_params": {"custom_logit_processor": "disallowed_tokens"},
    "strict_schema": {"json_schema": SCHEMA},
    "sampling_params.strict_schema": {"sampling_params": {"json_schema": SCHEMA}},
    "grammar_after": {"regex": PATTERN},
    "sampling_params.grammar_after": {"sampling_params": {"regex": PATTERN}},
    "guided_whitespace_pattern": {"guided_json": SCHEMA},
    "stream_options": {"stream": True},
    "best_of": {"temperature": 1.0},
    "parameters.best_of": {"parameters": {"do_sample": True}},
    "parameters.decoder_input_details": {"parameters": {"details": True}},
    "parameters.top_n_tokens": {"parameters": {"details": True}},
    "top_logprobs_num": {"return_logprob": True},
    "token_ids_logprob": {"return_logprob": True},
    "logprobs_mode": {"return_logprob": True},
    "return_text_in_logprobs": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "return_sampling_mask": {"sampling_params": {"top_k": 3}},
    "session_params.rid": {"session_params": {"id": "open"}},
    "session_params.offset": {"session_params": {"id": "open"}},
    "session_params.replace": {"session_params": {"id": "open"}},
    "session_params.drop_previous_output": {"session_params": {"id": "open"}},
}
"""What a field needs beside itself."""

OF_A_CHAT = ("tools", "tool_choice", "add_generation_prompt", "chat_template_kwargs", "reasoning", "thinking")
"""Fields of /tokenize that need messages."""

WITH_LOGPROBS = ("logprobs_mode", "top_logprobs", "logprob_token_ids", "return_tokens_as_token_ids")
NOT_HERE = {
    "image_data": "tests/servers/test_shapes_vlm_server.py shows pictures to a model that sees",
    "video_data": "tests/servers/test_shapes_vlm_server.py shows pictures to a model that sees",
    "images": "tests/servers/test_shapes_vlm_server.py shows pictures to a model that sees",
    "modalities": "tests/api/test_media_fields.py",
    "dimensions": "tests/api/test_embedding_server.py has a model whose embeddings may be cut",
    "pooling": "tests/api/test_openai_embeddings.py",
    "prompt_name": "tests/models/test_decoder_embeddings.py has a model with prompts",
    "instruct": "tests/models/test_decoder_embeddings.py has a reranker that takes one",
    "reasoning_effort": "tests/api/test_chat_prompt.py has templates that know it",
    "think": "tests/api/test_ollama.py has templates that know it",
    "input_ids": "tests/api/test_contract.py: it stands in place of text",
    "input_embeds": "tests/api/test_contract.py: it stands in place of text",
    "input_id": "tests/api/test_mindie.py: it stands in place of inputs",
    "guided_structural_tag": "tests/api/test_constraint_fields.py",
    "session_params.rid": "tests/api/test_sessions.py: it names an earlier request",
    "raw": "tests/api/test_ollama.py",
    "continue_final_message": "tests/api/test_chat_conversations.py: it needs an assistant's message",
    "add_generation_prompt": "tests/api/test_chat_conversations.py",
    "background": "tests/api/test_responses_background.py: it needs a store",
    "conversation": "tests/api/test_responses_store.py: it needs a store",
    "previous_response_id": "tests/api/test_responses_store.py: it needs a store",
    "store": "tests/api/test_responses_store.py: it needs a store",
    "suffix": "tests/api/test_fill_in_middle.py has a model that fills gaps",
    "thinking_token_budget": "tests/api/test_chat_reasoning.py has a model that thinks",
    "require_reasoning": "tests/api/test_chat_reasoning.py has a model that thinks",
    "max_thinking_tokens": "tests/api/test_chat_reasoning.py has a model that thinks",
    "mcp_servers": "tests/api/test_anthropic_fields.py: told beside tools",
    "prompt_token_ids": "tests/api/test_token_fields.py: they stand in place of messages",
}
"""Fields that need more than a server of text, and where they are tested."""

KEPT_NULL = ("max_new_tokens",)
"""Null says something there: up to the context end."""


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[Servers]:
    stores = {"batch_path": str(tmp_path_factory.mktemp("batches"))}
    template = tmp_path_factory.mktemp("templates") / "last.jinja"
    template.write_text(LAST)
    with App(chat_template=str(template), enable_priority_scheduling=True, **stores) as running:
        assert running.post("/open_session", capacity_of_str_len=1000, session_id="open").status_code == 200
        loaded = running.post("/load_lora_adapter", lora_name="whisper", lora_path="/adapters/whisper")
        assert loaded.status_code == 200
        sent = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}\n", "application/jsonl")}}
        file_id = running.request("POST", "/v1/files", **sent).json()["id"]
        SHORTEST["OpenAI /v1/batches"]["input_file_id"] = EXAMPLES["input_file_id"] = file_id
        with other_servers(enable_priority_scheduling=True) as others:
            yield Servers(running, others)


def declared() -> Iterator[tuple[str, BodyPart, msgspec.structs.FieldInfo]]:
    """Each declared field of each route: of the object of its body that has it."""
    for route in compat_routes():
        for part in route.parts:
            for field in msgspec.structs.fields(part.struct):
                if field.encode_name not in part.table.told and field.encode_name not in part.table.refused:
                    yield f"{route.api} {route.route}", part, field


def path_of(part: BodyPart, name: str) -> str:
    return f"{part.name}.{name}" if part.name else name


DECLARED = [(name, path_of(part, field.encode_name), field) for name, part, field in declared()]
IDS = [f"{name} {path}" for name, path, _ in DECLARED]


def example(name: str, path: str, field: msgspec.structs.FieldInfo) -> Any:
    """A value that the field takes: written above, or the least that its type allows."""
    api, own = name.split(" ")[0], path.rpartition(".")[2]
    for written in (EXAMPLES_OF_ROUTES.get(name, {}), EXAMPLES_OF_ROUTES.get(api, {}), EXAMPLES):
        for key in (path, own):
            if key in written:
                return written[key]
    return least(inspect.type_info(field.type))


def least(kind: Any) -> Any:
    match kind:
        case inspect.Metadata():
            return least(kind.type)
        case inspect.UnionType():
            return least(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return kind.ge if kind.ge is not None else 0
        case inspect.FloatType():
            return kind.ge if kind.ge is not None else (kind.gt or 0) + 0.5
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return "a"
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [least(kind.item_type)]
    return {}


def shortest(name: str, path: str) -> dict[str, Any]:
    """The shortest body whose answer has few tokens, unless the field is about their number."""
    body = copy.deepcopy(SHORTEST[name])
    if name.endswith("/tokenize") and path in (*OF_A_CHAT, "messages"):
        body = {"messages": copy.deepcopy(CHAT)}
    limit = LIMITS.get(name, LIMITS.get(name.split(" ")[0]))
    if limit is not None and path.rpartition(".")[2] not in LENGTHS:
        body[limit[0]] = copy.deepcopy(limit[1])
    return body


def body_of(name: str, path: str, value: Any) -> dict[str, Any]:
    """A body with a value of the field, and what that needs."""
    body = shortest(name, path)
    beside = BESIDE.get(path, {})
    if path in WITH_LOGPROBS and name.startswith("OpenAI"):
        beside = {"logprobs": 1 if name.endswith("v1/completions") else True}
        if name.endswith("responses"):
            beside = {"include": ["message.output_text.logprobs"]}
    if path == "tool_choice":
        beside = {
            "tools": (EXAMPLES | EXAMPLES_OF_ROUTES.get(name.split(" ")[0], {}) | EXAMPLES_OF_ROUTES.get(name, {}))[
                "tools"
            ]
        }
    for key, more in beside.items():
        body[key] = body.get(key, {}) | more if isinstance(more, dict) else more
    part, _, own = path.rpartition(".")
    (body.setdefault(part, {}) if part else body)[own] = value
    return body


def post(app: Servers, name: str, body: dict[str, Any]):
    return app.request("POST", f"/{name.partition(' /')[2]}", json=body)


@pytest.mark.parametrize(("name", "path", "field"), DECLARED, ids=IDS)
def test_a_field_that_is_honoured_is_taken_and_not_told(app, name, path, field):
    if path in NOT_HERE:
        assert NOT_HERE[path].startswith("tests/")
        return
    answer = post(app, name, body_of(name, path, example(name, path, field)))
    assert answer.status_code == 200, answer.text
    assert "x-tureen-ignored" not in answer.headers


@pytest.mark.parametrize("name", SHORTEST)
def test_null_is_not_sent_in_every_field(app, name):
    for path in [path for own, path, _ in DECLARED if own == name and path.rpartition(".")[2] not in KEPT_NULL]:
        body = shortest(name, path) | ({"session_params": {"id": "open"}} if "session_params." in path else {})
        part, _, own = path.rpartition(".")
        inside = body.setdefault(part, {}) if part else body
        is_required = inside.pop(own, None) is not None
        wanted = post(app, name, body) if is_required else None
        inside[own] = None
        answer = post(app, name, body)
        assert "x-tureen-ignored" not in answer.headers
        assert answer.status_code == (200 if wanted is None else wanted.status_code), (path, answer.text)
        if wanted is not None and wanted.status_code >= 400:
            ours, theirs = ({**one.json(), "request_id": None} for one in (answer, wanted))
            assert ours == theirs


@pytest.mark.parametrize("name", SHORTEST)
def test_null_is_not_sent_where_nobody_knows_the_field_either(app, name):
    """SGLang's router and SDKs write null for what they would not send, also for what newer servers know."""
    plain = post(app, name, SHORTEST[name])
    nulls = dict.fromkeys(("zebra", "temprature", "max_token", "tool"))
    for part in {"", *(path.rpartition(".")[0] for own, path, _ in DECLARED if own == name)}:
        body = copy.deepcopy(SHORTEST[name])
        if part == "session_params":
            body[part] = {"id": "open"}
        (body.setdefault(part, {}) if part else body).update(nulls)
        answer = post(app, name, body)
        assert (answer.status_code, answer.headers.get("x-tureen-ignored")) == (plain.status_code, None), answer.text


OTHER_ROUTES = {"SGLang and vLLM /tokenize": {"content"}}
"""Fields that make a body one of another API on the same path."""


def acting_somewhere() -> set[str]:
    """Names of fields that change an answer in some API of this server, or of another one: those that a dialect
    honours or refuses, without those that hold an object of a session."""
    known = known_options()
    names = {path.rpartition(".")[2] for _, path, _ in DECLARED if not path.startswith("session_params.")}
    for route in compat_routes():
        names |= {own for part in route.parts for own in part.table.refused if own.isidentifier()}
    return (names | {*known.absent, *known.names, *known.others.names}) - {*known.harmless.names}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SHORTEST)
def test_a_field_that_changes_the_answer_in_some_api_is_nowhere_called_ignored(app, name):
    """In the gate each field has one of two values, in turn, and some of the harmless fields are sent."""
    [route] = [one for one in compat_routes() if f"{one.api} {one.route}" == name]
    for part in route.parts:
        own = {*part.struct.__struct_fields__, *part.aliases, *part.table.told, *OTHER_ROUTES.get(name, ())}
        for place, field in enumerate(sorted(acting_somewhere() - own)):
            for value in some((17, {"a": 1})[:: 1 - place % 2 * 2], 1):
                body = copy.deepcopy(SHORTEST[name])
                if part.name == "session_params":
                    body[part.name] = {"id": "open"}
                (body.setdefault(part.name, {}) if part.name else body)[field] = value
                answer = post(app, name, body)
                assert answer.status_code in (400, 422), (part.name, field, answer.headers.get("x-tureen-ignored"))
                assert field in answer.text
        if not part.table.tells_unknown:
            continue
        harmless = {*known_options().harmless.names} - own - {*part.table.refused}
        for field in some(sorted(harmless), 9):
            body = copy.deepcopy(SHORTEST[name])
            (body.setdefault(part.name, {}) if part.name else body)[field] = "x"
            answer = post(app, name, body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-tureen-ignored"] == path_of(part, field)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("SGLang /generate", "sampling_params.close_early"),
        ("OpenAI /v1/completions", "close_early"),
        ("OpenAI /v1/chat/completions", "close_early"),
        ("Anthropic /v1/messages", "close_early"),
    ],
)
def test_how_a_constraint_ends_is_told_where_there_is_no_constraint(app, name, path):
    for beside, value, told in (({}, False, path), ({}, True, None), ({"regex": "a"}, False, None)):
        body, part = body_of(name, path, value), path.rpartition(".")[0]
        (body[part] if part else body).update(beside)
        answer = post(app, name, body)
        assert (answer.status_code, answer.headers.get("x-tureen-ignored")) == (200, told), answer.text


@pytest.mark.parametrize("name", ["temperature", "max_new_tokens", "seed", "regex"])
def test_a_sampling_field_beside_sampling_params_is_not_sent_when_it_is_null(app, name):
    assert post(app, "SGLang /generate", {"text": "say:a", name: None}).status_code == 200
    assert post(app, "SGLang /generate", {"text": "say:a", name: 1}).json()["error"]["code"] == "misplaced_field"
