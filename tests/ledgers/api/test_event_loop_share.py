"""What a request costs the event loop does not grow with what it brings: longer work is done in other threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from app_under_test import App
from work import counted

GUARDS = ("contract", "dialects", "app", "http", "requests")

MODEL = {"model": "default"}
SPARE = 4000
"""Calls and lines by which the shares of two requests may differ: reading takes some 80 for each 64 KiB of a body."""

ONE = {"max_new_tokens": 1}
"""An output is as short as can be: the work is counted line by line, which takes long."""

Body = Callable[[int], dict[str, Any]]


def _say(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}] * count


def _parts(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]


def _tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{index}", "strict": True}} for index in range(count)]


def _patterns(count: int) -> dict[str, Any]:
    return {**ONE, "stop_regex": [f"{'x' * count}{index}" for index in range(45)]}


def _scored(count: int) -> dict[str, Any]:
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    return {"text": "a" * count, **wanted, "sampling_params": ONE}


CASES: dict[str, tuple[str, Body, int, int]] = {
    "a text": ("/generate", lambda count: {"text": "a" * count}, 3_000, 300_000),
    "texts": ("/generate", lambda count: {"text": ["a" * count] * 8, "sampling_params": ONE}, 1_000, 100_000),
    "token ids": ("/generate", lambda count: {"input_ids": [1] * count}, 3_000, 300_000),
    "embeddings": ("/generate", lambda count: {"input_embeds": [[1.0] * 4] * count}, 100, 2_000),
    "stop patterns": ("/generate", lambda count: {"text": "a", "sampling_params": _patterns(count)}, 100, 300),
    "stop patterns of a chat": (
        "/v1/chat/completions",
        lambda count: {"messages": _say(1), **_patterns(count)},
        100,
        300,
    ),
    "stop patterns of a completion": ("/v1/completions", lambda count: {"prompt": "a", **_patterns(count)}, 100, 300),
    "a prompt": ("/v1/completions", lambda count: {"prompt": "a" * count}, 3_000, 300_000),
    "messages": ("/v1/chat/completions", lambda count: {"messages": _say(count)}, 1_000, 4_000),
    "parts": ("/v1/chat/completions", lambda count: {"messages": _parts(count)}, 1_000, 4_000),
    "tools": ("/v1/chat/completions", lambda count: {"messages": _say(1), "tools": _tools(count), **ONE}, 12, 120),
    "items": ("/v1/responses", lambda count: {"input": _say(count)}, 1_000, 4_000),
    "Anthropic's messages": (
        "/v1/messages",
        lambda count: {"messages": _say(count), "max_tokens": 1, **MODEL},
        1_000,
        4_000,
    ),
    "Anthropic's blocks": (
        "/v1/messages/count_tokens",
        lambda count: {"messages": _parts(count), **MODEL},
        1_000,
        4_000,
    ),
    "Ollama's messages": ("/api/chat", lambda count: {"messages": _say(count), "stream": False, **MODEL}, 1_000, 4_000),
    "a text to tokenize": ("/tokenize", lambda count: {"prompt": "a" * count}, 3_000, 300_000),
    "messages to tokenize": ("/tokenize", lambda count: {"messages": _say(count)}, 1_000, 4_000),
    "tokens to decode": ("/detokenize", lambda count: {"tokens": [97] * count}, 3_000, 30_000),
    "a text to embed": ("/v1/embeddings", lambda count: {"input": "a" * count}, 3_000, 300_000),
    "an output with calls": (
        "/parse_function_call",
        lambda count: {"text": "a<tool_call>" * count, "tools": _tools(1)},
        300,
        3_000,
    ),
    "an output with reasoning": (
        "/separate_reasoning",
        lambda count: {"text": "<think>a</think>" * count, "reasoning_parser": "qwen3"},
        300,
        30_000,
    ),
    "log-probabilities of a prompt": ("/generate", _scored, 200, 1_200),
    "the same of a stream": ("/generate", lambda count: {**_scored(count), "stream": True}, 200, 1_200),
    "an echoed prompt": (
        "/v1/completions",
        lambda count: {"prompt": "a" * count, "echo": True, "logprobs": 5, "max_tokens": 1},
        200,
        1_200,
    ),
}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(chat_template="chatml") as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_what_is_longer_costs_the_event_loop_no_more(app: App, name: str):
    path, body, few, many = CASES[name]
    app.post(path, **body(few))  # later ones find done what the first one does
    shares = []
    for count in (few, many):
        with counted() as work:
            response = app.post(path, **body(count))
        assert response.status_code in (200, 400), response.text
        shares.append(work.on_loop)
    assert shares[1] - shares[0] <= SPARE, shares


def test_a_count_of_work_sees_every_entry_that_is_looked_at():
    with counted() as short:
        [entry for entry in range(100)]  # noqa: C416 - the work
    with counted() as long:
        [entry for entry in range(10_000)]  # noqa: C416
    assert long.on_loop > 50 * short.on_loop / 2
