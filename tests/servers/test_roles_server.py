"""The real model over HTTP, with replicas that compute prompts for others: the tokens are those of a server without
roles, whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
from followers import PATIENCE_S, engines, follow_all, states, wait_until
from real_app import write_model
from server_process import ServerProcess

PLACES = ("the sea", "a river", "the hills", "an old bridge", "the market", "a forest", "the station")
LEAST = "64"


def _prompt(name: str, num_lines: int) -> str:
    lines = (f"{index}. {name} walked from {PLACES[index % 7]} to {PLACES[index % 5]}. " for index in range(num_lines))
    return "".join(lines) + "Then"


def _streams() -> dict[str, dict]:
    """Return prompts of about 100 tokens, and a short one."""
    plain = {"max_new_tokens": 24, "ignore_eos": True}
    seeded = plain | {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 7}
    schema = json.dumps({"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 5, "maxItems": 5})
    penalties = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    return {
        "greedy": {"text": _prompt("Ada", 6), "sampling_params": plain | {"temperature": 0}},
        "warm": {"text": _prompt("Ben", 6), "sampling_params": seeded},
        "samples": {"text": _prompt("Cleo", 6), "sampling_params": seeded | {"n": 2}},
        "grammar": {"text": _prompt("Dan", 6), "sampling_params": seeded | {"json_schema": schema}},
        "penalties": {"text": _prompt("Eve", 6), "sampling_params": seeded | penalties},
        "scores": {
            "text": _prompt("Finn", 6),
            "sampling_params": seeded,
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
        "prompt-scores": {
            "text": _prompt("Gus", 6),
            "sampling_params": seeded,
            "return_logprob": True,
            "logprob_start_len": 80,
        },
        "short": {"text": "Once upon a time", "sampling_params": seeded},
    }


def _lasting_streams() -> dict[str, dict]:
    """Streams of one prompt, which begin together and go on for a while."""
    body = {"text": _prompt("Jo", 6), "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    seeded = body["sampling_params"] | {"temperature": 0.8, "sampling_seed": 3}
    return {
        "lasting": body | {"sampling_params": body["sampling_params"] | {"temperature": 0}},
        "lasting-samples": body | {"sampling_params": seeded | {"n": 2}},
        "lasting-scores": body | {"sampling_params": seeded, "return_logprob": True},
    }


STREAMS, LASTING = _streams(), _lasting_streams()
LONG = {"long": {"text": _prompt("Hana", 24), "sampling_params": {"temperature": 0, "max_new_tokens": 16}}}


def replicas(server: ServerProcess) -> list[dict]:
    (model,) = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["models"]
    return model["replicas"]


def test_the_tokens_of_two_fronts_are_those_without_roles_whoever_is_killed(server, tmp_path):
    """tests/serving/test_roles.py kills, freezes and drains either at each step."""
    without_roles = follow_all(server, STREAMS | LASTING | LONG)
    kept = ("--kv-disk", str(tmp_path / "kv"), "--freeze-grace-s", str(PATIENCE_S))
    roles = ("--replicas", "2", "--prefill-replicas", "1", "--prefill-min-tokens", LEAST, "--api-workers", "2")
    with ServerProcess(*roles, *kept) as server:
        server.wait_ready()
        prompts_are_computed_elsewhere(server, without_roles)
        the_client_hears_how_much_was_cached_before(server)
        killed = follow_all(server, LASTING, lambda: os.kill(engines(server)[1], signal.SIGKILL))
        assert killed == {name: without_roles[name] for name in LASTING}
        wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")
        computing = engines(server)[0]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(follow_all, server, LONG)
            wait_until(lambda: replicas(server)[0]["num_running"] == 1 or answer.done(), "it computes")
            os.kill(computing, signal.SIGKILL)
            assert answer.result(PATIENCE_S) == {"long": without_roles["long"]}


def prompts_are_computed_elsewhere(server, without_roles):
    answers = follow_all(server, STREAMS)
    assert answers == {name: without_roles[name] for name in STREAMS}
    num_prompt = sum(output[2][2] for outputs in answers.values() for output in outputs)
    wait_until(lambda: replicas(server)[0]["prompt_tokens"] > 0.8 * num_prompt, "the figures of all fronts")
    wait_until(lambda: replicas(server)[1]["prompt_tokens"] == num_prompt, "the figures of all fronts")
    assert [replica["role"] for replica in replicas(server)] == ["prefill", "decode"]
    wait_until(
        lambda: replicas(server)[1]["cached_tokens"] == replicas(server)[0]["prompt_tokens"], "all was handed over"
    )


def the_client_hears_how_much_was_cached_before(server):
    body = {"text": _prompt("Ines", 14), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    first, again = (httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).json() for _ in range(2))
    assert first["text"] == again["text"]
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] > 150


def conversation(server) -> tuple[list, list[int], list[int]]:
    """Return of ten turns the output tokens and log-probabilities, the cached tokens and the tokens of the prompts."""
    tokens, outputs, cached, lengths = list(b"The states of the first prompt " * 3), [], [], []
    for turn in range(10):
        params = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).raise_for_status().json()
        outputs.append([answer["output_ids"], answer["meta_info"]["output_token_logprobs"]])
        cached.append(answer["meta_info"]["cached_tokens"])
        lengths.append(len(tokens))
        tokens += [*answer["output_ids"], *f" turn {turn}, which is new".encode()]
    return outputs, cached, lengths


def test_states_of_recurrent_layers_are_handed_over_with_their_pages(tmp_path):
    """No token of a conversation is computed twice."""
    write_model(tmp_path / "model", 0, "lfm2")
    served = (str(tmp_path / "model"), "--device", "cpu", "--max-total-tokens", "4096", "--page-size", "4")
    with ServerProcess(*served) as server:
        expected, cached_alone, _ = conversation(server.wait_ready())
    roles = ("--replicas", "2", "--prefill-replicas", "1", "--prefill-min-tokens", "16")
    with ServerProcess(*served, *roles, "--kv-disk", str(tmp_path / "kv")) as server:
        outputs, cached, lengths = conversation(server.wait_ready())
        assert outputs == expected
        for number, before in zip(cached[1:], lengths, strict=False):  # what follows the prompt may not be saved yet
            assert number >= (before - 1) // 4 * 4
        assert all(here <= alone for here, alone in zip(cached, cached_alone, strict=True))
        num_prompt = sum(lengths)

        def figures(name: str) -> list[int]:
            return [replica[name] for replica in replicas(server)]

        wait_until(lambda: figures("prompt_tokens")[1] == num_prompt, "the figures of the replica that answers")
        num_computed = num_prompt - sum(cached)
        wait_until(
            lambda: sum(figures("prompt_tokens")) - sum(figures("cached_tokens")) == num_computed, "all was handed over"
        )
        assert figures("prompt_tokens")[0] > 0.5 * num_prompt
