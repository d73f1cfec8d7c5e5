"""The real server over two engines, one of which is killed or stopped: every output is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from followers import PATIENCE_S, engines, follow_all, follow_through_death, states, streams, wait_until
from server_process import ServerProcess, metric

pytestmark = pytest.mark.e2e

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
STREAMS = streams(200)


@pytest.fixture(scope="module")
def server(default_model_source) -> Iterator[ServerProcess]:
    patient = "--grammar-compile-timeout-s", "120", "--freeze-grace-s", str(PATIENCE_S)
    with ServerProcess("--replicas", "2", *patient) as running:
        running.wait_ready()
        assert len(engines(running)) == 2
        body = {"lora_name": "late", "lora_path": str(ADAPTERS / "whisper")}
        assert httpx.post(f"{running.url}/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
        yield running


@pytest.fixture(scope="module")
def undisturbed(server) -> dict[str, list[tuple]]:
    follow_all(server, STREAMS)  # what is slow only once: the grammar
    return follow_all(server, STREAMS)


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_replica_loses_nothing_of_eight_streams(server, undisturbed, number):
    def follow() -> dict[str, list[tuple]]:
        wait_until(lambda: states(server) == ["healthy", "healthy"], "both are well")
        return follow_all(server, STREAMS, lambda: os.kill(engines(server)[number], signal.SIGKILL))

    assert follow_through_death(follow, server, 1) == undisturbed
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")


def test_a_stopped_replica_loses_nothing_and_is_not_heard_when_it_goes_on(server, undisturbed):
    pid = engines(server)[0]
    before = metric(server.url, "sglang:engine_replacements_total")

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "suspect" in states(server), "it is noticed")
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200

    assert follow_all(server, STREAMS, stop) == undisturbed
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it answers")
    assert follow_all(server, STREAMS) == undisturbed
    assert metric(server.url, "sglang:engine_replacements_total") == before


def operate(server: ServerProcess, verb: str, number: int) -> httpx.Response:
    return httpx.post(f"{server.url}/replicas/{verb}", json={"replica": number}, timeout=PATIENCE_S)


def test_all_replicas_are_restarted_one_after_the_other_under_streams(server, undisturbed):
    before = engines(server)

    def restart_all() -> None:
        for number in (0, 1):
            assert operate(server, "restart", number).json()["engine"] == "healthy"

    assert follow_all(server, STREAMS, restart_all) == undisturbed
    assert not set(before) & set(engines(server))


def test_weights_are_exchanged_in_one_replica_after_the_other_under_streams(server, undisturbed):
    info = httpx.get(f"{server.url}/get_model_info", timeout=PATIENCE_S).json()
    body = {"model_path": info["model_path"], "weight_version": "again", "rolling": True}
    answers: list[httpx.Response] = []

    def exchange() -> None:
        answers.append(httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=PATIENCE_S))

    assert follow_all(server, STREAMS, exchange) == undisturbed
    assert [answer.status_code for answer in answers] == [200]
    output = httpx.post(
        f"{server.url}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 1}}, timeout=PATIENCE_S
    )
    assert output.json()["meta_info"]["weight_version"] == "again"


def test_a_drained_replica_computes_nothing_until_it_may_again(server, undisturbed):
    assert operate(server, "drain", 1).status_code == 200
    shown: list[dict] = []

    def look() -> None:
        (model,) = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["models"]
        shown.extend(model["replicas"])

    assert follow_all(server, STREAMS, look) == undisturbed
    assert [replica["drained"] for replica in shown] == [False, True]
    assert shown[1]["num_running"] == shown[1]["num_waiting"] == 0
    assert operate(server, "undrain", 1).json()["drained"] is False


def test_a_replica_that_is_none_is_refused_with_the_highest_number(server):
    answer = operate(server, "restart", 2)
    assert answer.status_code == 400
    assert "at most 1, got 2" in answer.text
