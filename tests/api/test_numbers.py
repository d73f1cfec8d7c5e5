"""Every number in an answer is one: no dialect sends null, NaN or an infinity in its place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from one_request import DIALECTS, lines_of
from real_app import RealApp, write_model

NATIVE = {"text": "abc", "sampling_params": {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 5}}
ROUTES = DIALECTS | {"SGLang": ("/generate", NATIVE)}
PLACES = {"Ollama": "options", "TGI": "parameters", "SGLang": "sampling_params"}
"""Where a dialect has its sampling parameters, if not in the body itself."""

LOGPROBS: dict[str, dict[str, Any]] = {
    "completions": {"logprobs": 5, "logprob_token_ids": [7, 98], "prompt_logprobs": 3, "echo": True},
    "chat completions": {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": [7, 98], "prompt_logprobs": 3},
    "Responses": {"top_logprobs": 5, "include": ["message.output_text.logprobs"]},
    "TGI": {"parameters": {"details": True, "top_n_tokens": 5, "decoder_input_details": True}},
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
}
"""Fields of a dialect that forbid tokens, one set after the other; others take those of PARAMETERS."""

PARAMETERS: list[dict[str, Any]] = [{}, {"allowed_token_ids": [97, 98, 99]}, {"regex": "a[bc]+d"}, {"top_k": 1}]
NO_NUMBERS = frozenset((
    "completed_at", "conversation", "effort", "error", "finish_reason", "incomplete_details", "instructions",
    "logprobs", "matched_stop", "previous_response_id", "reasoning", "reasoning_content", "refusal",
    "safety_identifier", "stop_reason", "stop_sequence", "summary", "text", "tool_calls", "usage", "user",
    "generated_text", "details", "seed", "top_tokens", "normalized_prompt_logprob", "rank",
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
    place = PLACES.get(family)
    forbidding = FORBIDDING.get(family) or [{place: each} if place else each for each in PARAMETERS]
    for each, stream in itertools.product(forbidding, (False, True)):
        asked = joined(joined(body | {"model": "default", "stream": stream}, each), LOGPROBS.get(name, {}))
        if stream:
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
        answer = lines_of(response.text) if body["stream"] else response.json()
        json.loads(json.dumps(answer), parse_constant=number_of)
        assert set(nulls_in(answer)) == set(), body
