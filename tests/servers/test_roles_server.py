"""The real model over HTTP, with replicas that compute prompts for others: the tokens are those of a server without
roles, whoever is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from followers import MAX_ATTEMPTS, PATIENCE_S, engines, follow_all, states, wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.e2e

PLACES = ("the sea", "a river", "the hills", "an old bridge", "the market", "a forest", "the station")
LEAST = "64"


def _prompt(name: str, num_lines: int) -> str:
    lines = (f"{index}. {name} walked from {PLACES[index % 7]} to {PLACES[index % 5]}. " for index in range(num_lines))
    return "".join(lines) + "Then"


def _streams() -> dict[str, dict]:
    """Prompts of some 250 tokens, and a short one."""
    plain = {"max_new_tokens": 40, "ignore_eos": True}
    seeded = plain | {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 7}
    schema = json.dumps({"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 9, "maxItems": 9})
    penalties = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    return {
        "greedy": {"text": _prompt("Ada", 15), "sampling_params": plain | {"temperature": 0}},
        "warm": {"text": _prompt("Ben", 15), "sampling_params": seeded},
        "samples": {"text": _prompt("Cleo", 15), "sampling_params": seeded | {"n": 2}},
        "grammar": {"text": _prompt("Dan", 15), "sampling_params": seeded | {"json_schema": schema}},
        "penalties": {"text": _prompt("Eve", 15), "sampling_params": seeded | penalties},
        "scores": {
            "text": _prompt("Finn", 15),
            "sampling_params": seeded,
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
        "prompt-scores": {
            "text": _prompt("Gus", 15),
            "sampling_params": seeded,
            "return_logprob": True,
            "logprob_start_len": 200,
        },
        "short": {"text": "Once upon a time", "sampling_params": seeded},
    }


def _lasting_streams() -> dict[str, dict]:
    """Streams of one prompt, which begin together and go on for a while."""
    body = {"text": _prompt("Jo", 15), "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    seeded = body["sampling_params"] | {"temperature": 0.8, "sampling_seed": 3}
    return {
        "lasting": body | {"sampling_params": body["sampling_params"] | {"temperature": 0}},
        "lasting-samples": body | {"sampling_params": seeded | {"n": 2}},
        "lasting-scores": body | {"sampling_params": seeded, "return_logprob": True},
    }


STREAMS, LASTING = _streams(), _lasting_streams()
LONG = {"long": {"text": _prompt("Hana", 60), "sampling_params": {"temperature": 0, "max_new_tokens": 40}}}


@pytest.fixture(scope="module")
def without_roles(default_model_source) -> dict[str, list[tuple]]:
    with ServerProcess() as server:
        server.wait_ready()
        return follow_all(server, STREAMS | LASTING | LONG)


def replicas(server: ServerProcess) -> list[dict]:
    (model,) = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["models"]
    return model["replicas"]


@pytest.fixture(scope="module")
def server(tmp_path_factory, default_model_source) -> Iterator[ServerProcess]:
    kept = ("--kv-disk", str(tmp_path_factory.mktemp("roles") / "kv"), "--freeze-grace-s", str(PATIENCE_S))
    with ServerProcess("--replicas", "2", "--prefill-replicas", "1", "--prefill-min-tokens", LEAST, *kept) as running:
        yield running.wait_ready()


def test_the_tokens_are_those_of_a_server_without_roles_and_the_prompts_were_computed_elsewhere(server, without_roles):
    answers = follow_all(server, STREAMS)
    assert answers == {name: without_roles[name] for name in STREAMS}
    first, second = replicas(server)
    assert [first["role"], second["role"]] == ["prefill", "decode"]
    num_prompt = sum(output[2][2] for outputs in answers.values() for output in outputs)
    assert first["prompt_tokens"] > 0.8 * num_prompt
    assert second["prompt_tokens"] == num_prompt
    assert second["cached_tokens"] == first["prompt_tokens"]


def test_the_client_hears_how_much_was_cached_before_anybody_computed(server):
    body = {"text": _prompt("Ines", 20), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    first, again = (httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).json() for _ in range(2))
    assert first["text"] == again["text"]
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] > 200


def test_the_one_that_answers_may_be_killed(server, without_roles):
    killed = follow_all(server, LASTING, lambda: os.kill(engines(server)[1], signal.SIGKILL))
    assert killed == {name: without_roles[name] for name in LASTING}
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")


def test_the_one_for_prompts_may_be_killed_while_it_computes(server, without_roles):
    num_prompt = without_roles["long"][0][2][2]
    pid, answering = engines(server)
    for attempt in range(MAX_ATTEMPTS):
        body = LONG["long"] | {"cache_salt": f"attempt {attempt}"}
        before = replicas(server)[1]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(follow_all, server, {"long": body})
            wait_until(lambda running=answer: replicas(server)[0]["num_running"] == 1 or running.done(), "it computes")
            os.kill(pid, signal.SIGKILL)
            assert answer.result(PATIENCE_S) == {"long": without_roles["long"]}
        after = replicas(server)[1]
        assert after["prompt_tokens"] == before["prompt_tokens"] + num_prompt
        wait_until(lambda killed=pid: len({*engines(server)} - {killed}) == 2, "another one is started")
        wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")
        (pid,) = {*engines(server)} - {answering}
        if after["cached_tokens"] < before["cached_tokens"] + num_prompt // 2:  # it had not handed the prompt over
            return
    raise AssertionError(f"killed too late, {MAX_ATTEMPTS} times")


def test_each_of_several_fronts_hands_over(tmp_path, without_roles):
    flags = ("--replicas", "2", "--prefill-replicas", "1", "--prefill-min-tokens", LEAST, "--api-workers", "2")
    with ServerProcess(*flags, "--kv-disk", str(tmp_path / "kv"), "--num-threads", "1") as server:
        server.wait_ready()
        fewer = {name: STREAMS[name] for name in ("greedy", "warm", "samples", "scores")}
        answers = follow_all(server, fewer)
        assert answers == {name: without_roles[name] for name in fewer}
        num_prompt = sum(output[2][2] for outputs in answers.values() for output in outputs)
        wait_until(lambda: replicas(server)[0]["prompt_tokens"] > 0.8 * num_prompt, "all figures")


def _engine(role: str, folder: Path) -> ServerProcess:
    flags = ["--listen", "127.0.0.1:0", "--role", role, "--kv-disk", str(folder), "--num-threads", "1"]
    return ServerProcess(command=["engine", *flags])


def _address(engine: ServerProcess) -> str:
    ready = "takes requests of servers at"
    wait_until(lambda: ready in engine.output or engine.process.poll() is not None, "a start")
    assert engine.process.poll() is None, engine.output
    return re.search(r"tcp://127\.0\.0\.1:\d+", engine.output).group()


def test_engines_elsewhere_tell_their_roles_and_must_share_a_folder(tmp_path, without_roles):
    with (
        _engine("decode", tmp_path / "kv") as answering,
        _engine("prefill", tmp_path / "kv") as computing,
        _engine("prefill", tmp_path / "other") as apart,
    ):
        both = f"{_address(answering)},{_address(computing)}"
        with ServerProcess("--replicas", both, "--prefill-min-tokens", LEAST, "--api-workers", "2") as server:
            server.wait_ready()
            wait_until(lambda: states(server) == ["healthy", "healthy"], "both are there")
            assert follow_all(server, STREAMS) == {name: without_roles[name] for name in STREAMS}
            told = replicas(server)
            assert [each["role"] for each in told] == ["decode", "prefill"]
        with ServerProcess("--replicas", f"{_address(answering)},{_address(apart)}") as server:
            assert server.process.wait(PATIENCE_S) != 0
        assert "do not share the folder of --kv-disk" in server.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serve", "--port", "0", "--replicas", "2", "--prefill-replicas", "1"], "no --kv-disk"),
        (["serve", "--port", "0", "--prefill-replicas", "1"], "one at least must answer"),
        (["engine", "--role", "prefill"], "--role prefill without --kv-disk"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(command, message, default_model_source):
    server = ServerProcess(command=command)
    assert server.process.wait(PATIENCE_S) != 0
    server.stop()
    assert message in server.output
