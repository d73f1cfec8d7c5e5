"""Every number in an answer is one: no dialect sends null, NaN or an infinity in its place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from app_under_test import App
from kinds_of_servers import Servers, other_servers
from one_request import DIALECTS, SEEDED, SHORTEST_WITHOUT_OUTPUT, lines_of
from real_app import RealApp, write_model

from tureen.app.compat import compat_routes

NATIVE = {"text": "abc", "sampling_params": {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 5}}
IDS = [97, 98, 99]
TENSOR = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": IDS}
LIKE_TGI = SEEDED | {"max_new_tokens": 12, "do_sample": True}
ROUTES = DIALECTS | {
    "SGLang": ("/generate", NATIVE),
    "llama.cpp": ("/completion", {"prompt": "abc", "n_predict": 12} | SEEDED),
    "vLLM": ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 12} | SEEDED}),
    "MindIE's infer": ("/infer", {"inputs": "abc", "parameters": LIKE_TGI}),
    "Triton's text": ("/v2/models/default/generate", {"text_input": "abc", "parameters": LIKE_TGI}),
    "Triton's tensors": ("/v2/models/default/infer", {"inputs": [TENSOR], "parameters": LIKE_TGI}),
}
NAMES = {
    "Anthropic": "Anthropic /v1/messages",
    "Ollama's chat": "Ollama /api/chat",
    "Ollama's prompts": "Ollama /api/generate",
    "Ollama, raw": "Ollama /api/generate",
    "TGI": "TGI /generate",
    "MindIE": "MindIE and vLLM's demo server /generate",
    "Responses": "OpenAI /v1/responses",
    "chat completions": "OpenAI /v1/chat/completions",
    "completions": "OpenAI /v1/completions",
    "SGLang": "SGLang /generate",
    "llama.cpp": "llama.cpp /completion",
    "vLLM": "vLLM /inference/v1/generate",
    "MindIE's infer": "MindIE /infer",
    "Triton's text": "MindIE /v2/models/default/generate",
    "Triton's tensors": "MindIE /v2/models/default/infer",
}
"""Each of ROUTES -> the route as /compat names it."""

WITHOUT_TEXT: dict[str, dict[str, Any]] = SHORTEST_WITHOUT_OUTPUT | {
    "Anthropic /v1/messages/count_tokens": {"model": "default", "messages": [{"role": "user", "content": "a"}]},
    "Ollama /api/embed": {"model": "default", "input": "a"},
    "Ollama /api/embeddings": {"model": "default", "prompt": "a"},
    "llama.cpp /infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4, "n_probs": 3},
}
"""Routes of models that do not continue a prompt, or do not need to, with a body."""

NO_NUMBERS_IN_ANSWER = {"OpenAI /v1/batches": "it answers with a job, whose times are null until they come"}
PLACES = {
    "Ollama": "options",
    "TGI": "parameters",
    "SGLang": "sampling_params",
    "vLLM": "sampling_params",
    "MindIE's infer": "parameters",
    "Triton's text": "parameters",
    "Triton's tensors": "parameters",
}
"""Where a dialect has its sampling parameters, if not in the body itself."""

LOGPROBS: dict[str, dict[str, Any]] = {
    "completions": {"logprobs": 5, "logprob_token_ids": [7, 98], "prompt_logprobs": 3, "echo": True},
    "chat completions": {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": [7, 98], "prompt_logprobs": 3},
    "Responses": {"top_logprobs": 5, "include": ["message.output_text.logprobs"]},
    "TGI": {"parameters": {"details": True, "top_n_tokens": 5, "decoder_input_details": True}},
    "Ollama's chat": {"logprobs": True, "top_logprobs": 5},
    "Ollama's prompts": {"logprobs": True, "top_logprobs": 5},
    "Ollama, raw": {"logprobs": True, "top_logprobs": 5},
    "llama.cpp": {"n_probs": 5},
    "vLLM": {"sampling_params": {"logprobs": 5, "prompt_logprobs": 3}},
    "MindIE's infer": {"parameters": {"details": True, "decoder_input_details": True}},
    "Triton's text": {"parameters": {"details": True}},
    "SGLang": {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 5,
        "token_ids_logprob": [7, 98],
        "logprobs_mode": "both",
    },
}
"""The fields of a dialect that ask for log-probabilities, also of tokens that cannot come."""

NOT_IN_STREAMS = ("prompt_logprobs", "echo", "decoder_input_details")
FORBIDDING: dict[str, list[dict[str, Any]]] = {
    "Ollama": [{"options": {"top_k": 1}}, {"format": {"type": "integer"}}],
    "TGI": [{"parameters": {"grammar": {"type": "regex", "value": "a[bc]+d"}}}],
    "MindIE": [{"logit_bias": {"97": -100}}],
    "llama.cpp": [{"logit_bias": [[97, False]]}, {"grammar": 'root ::= "a" [bc]+ "d"'}, {"top_k": 1}],
    "MindIE's infer": [{"parameters": {"top_k": 1}}],
    "Triton's text": [{"parameters": {"top_k": 1}}],
    "Triton's tensors": [{"parameters": {"top_k": 1}}],
}
"""Fields of a dialect that forbid tokens, one set after the other; others take those of PARAMETERS."""

PARAMETERS: list[dict[str, Any]] = [{}, {"allowed_token_ids": [97, 98, 99]}, {"regex": "a[bc]+d"}, {"top_k": 1}]
NO_NUMBERS = frozenset((
    "completed_at", "conversation", "effort", "error", "finish_reason", "incomplete_details", "instructions",
    "logprobs", "matched_stop", "previous_response_id", "reasoning", "reasoning_content", "refusal",
    "safety_identifier", "stop_reason", "stop_sequence", "summary", "text", "tool_calls", "usage", "user",
    "generated_text", "details", "seed", "top_tokens", "normalized_prompt_logprob", "rank",
    "bytes", "kv_transfer_params", "decode_time", "prefill_time", "model_version",
))  # fmt: skip
"""Fields that may be null: they are no numbers, or their API declares them as a number or null."""

OF_PROMPTS = ("input_", "prompt_", "prefill", "token_logprobs", "top_logprobs")
"""Beginnings of the names of lists about a prompt: nothing predicts its first token, whose entry is null."""


def joined(body: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body with further fields, at any depth."""
    added = {name: joined(body[name], value) for name, value in fields.items() if isinstance(body.get(name), dict)}
    return body | fields | added


def requests_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the body of each request of one dialect."""
    path, body = ROUTES[name]
    family = name.partition("'")[0].partition(",")[0]
    place = PLACES.get(name, PLACES.get(family))
    forbidding = (
        FORBIDDING.get(name) or FORBIDDING.get(family) or [{place: each} if place else each for each in PARAMETERS]
    )
    for each, stream in itertools.product(forbidding, (False, True)):
        if stream and name == "Triton's tensors":
            continue
        common = {} if path.startswith(("/v2", "/infer")) else {"model": "default"}
        common |= {} if path.startswith("/v2") else {"stream": stream}
        asked = joined(joined(body | common, each), LOGPROBS.get(name, {}))
        if stream:
            path = f"{path}_stream" if path.startswith("/v2") else path
            for fields in (asked, asked.get(place or "", {})):
                for field in NOT_IN_STREAMS:
                    fields.pop(field, None)
        yield path, asked


def nulls_in(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of nulls that are in the place of a number, without indices."""
    name = path.rpartition(".")[2]
    if isinstance(value, dict):
        for key, one in value.items():
            yield from nulls_in(one, f"{path}.{key}")
    elif isinstance(value, list):
        is_prompt = name.startswith(OF_PROMPTS) and _is_unpredicted(value[:1])
        is_entry = len(value) == 3 and isinstance(value[1], int)  # [logprob, token id, text or null]
        for one in value[:1] if is_entry else value[is_prompt:]:
            yield from nulls_in(one, f"{path}[]")
    elif value is None and name not in NO_NUMBERS:
        yield path


def _is_unpredicted(first: list[Any]) -> bool:
    [value] = first or [None]
    value = value.get("logprob") if isinstance(value, dict) else value
    return value is None or (isinstance(value, list) and value[:1] == [None])


def number_of(text: str) -> float:
    raise AssertionError(f"{text} is no number of JSON")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApp]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 3)
    with RealApp(folder, chat_template="chatml", grammar_backend="tureen") as running:
        yield running


@pytest.mark.parametrize("name", ROUTES)
def test_no_number_of_an_answer_is_null_or_infinite(app: RealApp, name):
    for path, body in requests_of(name):
        response = app.post(path, **body)
        assert response.status_code == 200, (body, response.text)
        is_stream = body.get("stream") or path.endswith("_stream")
        answer = lines_of(response.text) if is_stream else response.json()
        json.loads(json.dumps(answer), parse_constant=number_of)
        assert set(nulls_in(answer)) == set(), body


@pytest.fixture(scope="module")
def servers(app: RealApp) -> Iterator[Servers]:
    with App(chat_template="chatml") as generating, other_servers() as others:
        yield Servers(generating, others)


@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_no_number_of_an_answer_of_other_models_is_null_or_infinite(servers: Servers, name):
    body = WITHOUT_TEXT[name]
    response = servers.request("POST", f"/{name.partition(' /')[2]}", json=body)
    assert response.status_code == 200, response.text
    answer = json.loads(response.text, parse_constant=number_of)
    assert set(nulls_in(answer)) == set(), answer


def test_the_answers_of_every_route_are_searched():
    assert NAMES.keys() == ROUTES.keys()
    named = {f"{route.api} {route.route}" for route in compat_routes()}
    assert named == {*NAMES.values(), *WITHOUT_TEXT, *NO_NUMBERS_IN_ANSWER}
