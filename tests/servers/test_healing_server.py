"""The real server, whose engine process is killed or stopped: every output is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from followers import (
    PATIENCE_S,
    TEXT,
    ask,
    engine,
    engines,
    follow_all,
    follow_through_death,
    health,
    kill_engine,
    streams,
    wait_until,
    wait_well,
)
from server_process import ServerProcess, metric

pytestmark = pytest.mark.e2e

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
LONG = {"max_new_tokens": 100, "ignore_eos": True}
STREAMS = streams(100) | {
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
    with ServerProcess(*arguments, env={"PYTHONPATH": folder}) as running:
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
    follow_all(server, STREAMS)  # what is slow only once: torch, the grammar
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


def test_three_kills_blame_nobody_while_outputs_grow(server, undisturbed):
    def kill() -> None:
        for _ in range(3):
            before = lengths(server)
            kill_engine(server)
            wait_until(partial(have_grown, server, before), "outputs grow")

    assert follow_all(server, STREAMS, kill) == undisturbed


def lengths(server: ServerProcess) -> Counter[str]:
    """Of each request that runs, by its id, the tokens of its outputs so far."""
    counts: Counter[str] = Counter()
    (model,) = httpx.get(f"{server.url}/status/live", timeout=PATIENCE_S).json()["models"]
    for output in model["requests"]:
        counts[output["rid"]] += output["output_tokens"]
    return counts


def have_grown(server: ServerProcess, before: Counter[str]) -> bool:
    """Whether each request that still runs has more tokens than before."""
    return all(count > before[rid] for rid, count in lengths(server).items())


def kill_while(server: ServerProcess, is_there: Callable[[], bool], **body) -> tuple[dict, dict]:
    """A request's answer, and the answer when the engine is killed as soon as `is_there`."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server, **body)
        wait_until(lambda: is_there() or running.done(), "it has come so far")
        os.kill(engine(server), signal.SIGKILL)
        disturbed = running.result(PATIENCE_S)
    wait_well(server)
    return ask(server, **body), disturbed


def test_a_kill_while_a_prompt_is_computed_changes_nothing(server):
    body = {"text": TEXT * 120, "sampling_params": {"temperature": 0, "max_new_tokens": 8}, "cache_salt": "prefill"}
    whole, disturbed = kill_while(server, lambda: metric(server.url, "sglang:num_running_reqs") > 0, **body)
    assert disturbed["output_ids"] == whole["output_ids"]


def test_a_kill_while_a_grammar_is_compiled_changes_nothing(server):
    words = [f"{one}{other}" for one in "abcdefghij" for other in range(300)]
    params = {"max_new_tokens": 40, "sampling_seed": 3, "json_schema": json.dumps({"enum": words})}
    asked = threading.Event()
    asked.set()
    whole, disturbed = kill_while(server, asked.is_set, text="A word: ", sampling_params=params)
    assert disturbed["output_ids"] == whole["output_ids"]
    assert disturbed["text"].strip('"') in words


def test_a_kill_while_nothing_runs_or_the_replacement_loads_is_made_good(server):
    wait_well(server)
    first = engine(server)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: engines(server) not in ([], [first]), "another one is started")
    second = engine(server)
    os.kill(second, signal.SIGKILL)
    assert ask(server, text=TEXT, sampling_params={"temperature": 0, "max_new_tokens": 8})["text"]
    assert engine(server) not in (first, second)
    wait_well(server)


def test_turns_of_a_session_outlive_the_engine(server):
    def turns(between: Callable[[], None]) -> list[list[int]]:
        url = f"{server.url}/open_session"
        session = httpx.post(url, json={"capacity_of_str_len": 10_000}, timeout=PATIENCE_S).json()
        rid, found = None, []
        for text in (TEXT, "Then", "At last"):
            params = {"sampling_seed": 9, "max_new_tokens": 12}
            answer = ask(server, text=text, sampling_params=params, session_params={"id": session, "rid": rid})
            rid = answer["meta_info"]["id"]
            found.append(answer["output_ids"])
            between()
        return found

    assert turns(lambda: kill_engine(server)) == turns(lambda: None)
