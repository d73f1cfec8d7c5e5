"""Same request, same seed, same model: the same tokens and log-probabilities, whatever else is going on."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import uuid
from collections.abc import Iterator

import httpx
import pytest
from server_process import ServerProcess

PROMPT = "In the autumn of 1871 the keeper of the lighthouse wrote in his book that the sea"
NEW_TOKENS = 32
NUM_OTHERS = 14
KINDS = {
    "greedy": {"temperature": 0},
    "greedy-penalised": {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "min_new_tokens": 28},
    "seeded": {"sampling_seed": 11},
    "seeded-cut": {"sampling_seed": 12, "temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    "seeded-everything": {
        "sampling_seed": -13,
        "temperature": 0.8,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"28": -5, "30": 2.5},
        "stop_token_ids": [3],
    },
}


def asked(kind: str, **fields) -> dict:
    params = KINDS[kind] | {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"text": PROMPT, "sampling_params": params, "return_logprob": True} | fields


def other(number: int) -> dict:
    params = {"max_new_tokens": 10 + 3 * number, "temperature": 0.5 + number / 10, "ignore_eos": True}
    return {"text": f"Chapter {number}: " + "on the road " * (number % 7), "sampling_params": params}


def generate(server: ServerProcess, body: dict) -> dict:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def result(answer: dict) -> tuple[list[int], list[float], str]:
    """Token ids, their log-probabilities to the last bit, text."""
    logprobs = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs, answer["text"]


@pytest.fixture(scope="module")
def alone(server) -> dict[str, tuple]:
    """What each kind of request gives by itself, with nothing cached. The kinds differ from each other."""
    found = {kind: result(generate(server, asked(kind, cache_salt=uuid.uuid4().hex))) for kind in KINDS}
    assert len({tuple(ids) for ids, _, _ in found.values()}) == len(KINDS)
    assert all(len(ids) == NEW_TOKENS for ids, _, _ in found.values())
    return found


@pytest.fixture(scope="module")
def crowded_server(default_model_source) -> Iterator[ServerProcess]:
    """An engine in a process of its own, whose KV cache holds a few requests only and which computes small pieces."""
    with ServerProcess(
        "--engine", "process", "--max-total-tokens", "192", "--page-size", "8", "--chunked-prefill-size", "24"
    ) as running:
        yield running.wait_ready()


def warm(server: ServerProcess, kind: str) -> tuple:
    salt = uuid.uuid4().hex
    generate(server, asked(kind, cache_salt=salt))
    again = generate(server, asked(kind, cache_salt=salt))
    assert again["meta_info"]["cached_tokens"] > 0
    return result(again)


def streamed(server: ServerProcess, kind: str) -> tuple:
    with httpx.stream("POST", f"{server.url}/generate", json=asked(kind, stream=True), timeout=120) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return result(json.loads(events[-2]))


def test_with_a_warm_prefix_cache_streamed_in_a_batch_as_one_of_n_and_among_others(server, alone):
    with_a_warm_prefix_cache_streamed_and_as_part_of_a_batch_or_of_n(server, alone)
    among_others(server, alone)


def with_a_warm_prefix_cache_streamed_and_as_part_of_a_batch_or_of_n(server, alone):
    with concurrent.futures.ThreadPoolExecutor(len(KINDS)) as pool:
        for way in (warm, streamed):
            found = pool.map(functools.partial(way, server), KINDS)
            assert dict(zip(KINDS, found, strict=True)) == alone, way
    batch = asked("seeded") | {
        "text": [PROMPT] * len(KINDS),
        "sampling_params": [asked(kind)["sampling_params"] for kind in KINDS],
    }
    assert [result(answer) for answer in generate(server, batch)] == list(alone.values())
    samples = asked("seeded")
    samples["sampling_params"] = samples["sampling_params"] | {"n": 3, "sampling_seed": 10}
    assert result(generate(server, samples)[1]) == alone["seeded"]


def among_others(server, alone):
    with concurrent.futures.ThreadPoolExecutor(NUM_OTHERS + len(KINDS)) as pool:
        before = [pool.submit(generate, server, other(number)) for number in range(NUM_OTHERS // 2)]
        ours = {kind: pool.submit(generate, server, asked(kind)) for kind in KINDS}
        after = [pool.submit(generate, server, other(number)) for number in range(NUM_OTHERS // 2, NUM_OTHERS)]
        found = {kind: result(future.result()) for kind, future in ours.items()}
        for future in before + after:
            future.result()
    assert found == alone


def test_in_the_other_engine_mode_alone_and_preempted_and_computed_again_in_small_pieces(crowded_server, alone):
    found = {kind: result(generate(crowded_server, asked(kind, cache_salt=uuid.uuid4().hex))) for kind in KINDS}
    assert found == alone
    bodies = [asked(kind) for _ in range(3) for kind in KINDS]
    together = {"text": [PROMPT] * len(bodies), "sampling_params": [body["sampling_params"] for body in bodies]}
    answers = generate(crowded_server, together | {"return_logprob": True})
    assert [result(answer) for answer in answers] == [*alone.values()] * 3
    [stats] = httpx.get(f"{crowded_server.url}/server_info").json()["internal_states"]
    assert stats["total_preemptions"] >= 5
