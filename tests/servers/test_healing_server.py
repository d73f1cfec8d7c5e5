"""The real server, whose engine process is killed or stopped: every output is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from followers import (
    PATIENCE_S,
    TEXT,
    ask,
    engine,
    follow_all,
    follow_through_death,
    health,
    kill_engine,
    streams,
    wait_until,
    wait_well,
)
from server_process import ServerProcess, metric

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
LONG = {"max_new_tokens": 48, "ignore_eos": True}
STREAMS = streams(48) | {
    "processor": {"text": TEXT, "sampling_params": LONG | {"temperature": 0}, "custom_logit_processor": "counting"},
    "stop": {"text": TEXT, "sampling_params": LONG | {"sampling_seed": 4, "stop": ["zzz", "in the end of the "]}},
}


@pytest.fixture(scope="module")
def server(default_model_source) -> Iterator[ServerProcess]:
    registered = ("counting=counting_processor:Counting", "aborting=counting_processor:Aborting")
    folder = str(Path(__file__).parent)
    arguments = (
        "--engine",
        "process",
        "--logit-processor",
        registered[0],
        "--logit-processor",
        registered[1],
        "--resume-grace-s",
        "60",
        "--grammar-compile-timeout-s",
        "120",
        "--freeze-grace-s",
        str(PATIENCE_S),
    )
    with ServerProcess(*arguments, env={"PYTHONPATH": folder}, threads=None) as running:
        running.wait_ready()
        body = {"lora_name": "late", "lora_path": str(ADAPTERS / "whisper")}
        assert httpx.post(f"{running.url}/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
        wait_until(lambda: knows_its_grammar(running), "the grammar is compiled")
        yield running


def knows_its_grammar(server: ServerProcess) -> bool:
    """A machine that is very busy may not compile it within a request's time at first."""
    answer = httpx.post(f"{server.url}/generate", json=STREAMS["grammar"], timeout=PATIENCE_S)
    return answer.status_code == 200


@pytest.fixture(scope="module")
def undisturbed(server) -> dict[str, list[tuple]]:
    found = follow_all(server, STREAMS)
    assert len(found["samples"]) == 2
    assert all(one[1] for outputs in found.values() for one in outputs)
    return found


def test_a_killed_engine_is_a_pause_for_every_kind_of_stream(server, undisturbed):
    def follow() -> dict[str, list[tuple]]:
        wait_well(server)
        return follow_all(server, STREAMS, lambda: os.kill(engine(server), signal.SIGKILL))

    assert follow_through_death(follow, server, len(STREAMS)) == undisturbed
    wait_well(server)


def test_a_request_that_the_engine_dies_of_ends_alone_and_every_other_stream_is_the_same(server, undisturbed):
    streams = {name: STREAMS[name] for name in ("greedy", "warm", "samples", "grammar")}
    deadly = {"sampling_params": LONG | {"custom_params": {"abort": True}}, "custom_logit_processor": "aborting"}
    before = [metric(server.url, f"sglang:{name}_total") for name in ("engine_replacements", "num_poison_requests")]
    answers = []

    def ask_for_it() -> None:
        answers.append(httpx.post(f"{server.url}/generate", json=deadly | {"text": TEXT}, timeout=PATIENCE_S))

    found = follow_all(server, streams, ask_for_it)
    assert found == {name: undisturbed[name] for name in streams}
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(500, "poison")]
    after = [metric(server.url, f"sglang:{name}_total") for name in ("engine_replacements", "num_poison_requests")]
    assert after[0] >= before[0] + 3
    assert after[1] == before[1] + 1
    wait_well(server)


def test_a_stopped_engine_is_suspect_and_goes_on_where_it_was(server, undisturbed):
    before = metric(server.url, "sglang:engine_replacements_total")

    def stop() -> None:
        pid = engine(server)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: health(server) == (503, "engine_suspect"), "it is noticed")
        assert metric(server.url, "sglang:engine_suspect") == 1
        os.kill(pid, signal.SIGCONT)
        wait_well(server)

    assert follow_all(server, STREAMS, stop) == undisturbed
    assert metric(server.url, "sglang:engine_replacements_total") == before


def test_turns_of_a_session_outlive_the_engine(server):
    def turns(between: Callable[[], None]) -> list[list[int]]:
        url = f"{server.url}/open_session"
        session = httpx.post(url, json={"capacity_of_str_len": 10_000}, timeout=PATIENCE_S).json()
        rid, found = None, []
        for text in (TEXT, "Then"):
            params = {"sampling_seed": 9, "max_new_tokens": 12}
            answer = ask(server, text=text, sampling_params=params, session_params={"id": session, "rid": rid})
            rid = answer["meta_info"]["id"]
            found.append(answer["output_ids"])
            between()
        return found

    assert turns(lambda: kill_engine(server)) == turns(lambda: None)
