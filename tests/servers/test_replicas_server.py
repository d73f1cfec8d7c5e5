"""The real server with two fronts over two engines: whichever process dies or stops, outputs are those of an
undisturbed run. tests/serving simulates each moment of it, also with one front (test_router.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from decoys import Decoys, imported_by_python
from followers import PATIENCE_S, engines, follow_all, follow_through_death, states, streams, wait_until
from front_streams import kill_front
from server_process import ServerProcess, metric

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
STREAMS = streams(48)
BODY = {"text": "Once", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 5}}


@pytest.fixture(scope="module")
def server(default_model_source, tmp_path_factory) -> Iterator[ServerProcess]:
    decoys = Decoys(tmp_path_factory.mktemp("decoys"), without=imported_by_python())
    patient = "--grammar-compile-timeout-s", "120", "--freeze-grace-s", str(PATIENCE_S)
    with ServerProcess("--api-workers", "2", "--replicas", "2", *patient, cwd=decoys.folder) as running:
        running.wait_ready()
        assert len(engines(running)) == 2
        body = {"lora_name": "late", "lora_path": str(ADAPTERS / "whisper")}
        assert httpx.post(f"{running.url}/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
        yield running
    assert decoys.imported == []


@pytest.fixture(scope="module")
def undisturbed(server) -> dict[str, list[tuple]]:
    return follow_all(server, STREAMS)


def wait_well(server: ServerProcess) -> None:
    wait_until(lambda: states(server) == ["healthy", "healthy"], "both are well")


def test_a_killed_replica_loses_nothing_and_a_stopped_one_goes_on_when_it_thaws(server, undisturbed):
    def follow() -> dict[str, list[tuple]]:
        wait_well(server)
        return follow_all(server, STREAMS, lambda: os.kill(engines(server)[0], signal.SIGKILL))

    assert follow_through_death(follow, server, 1) == undisturbed
    wait_well(server)
    before = metric(server.url, "sglang:engine_replacements_total")

    def stop() -> None:
        os.kill(engines(server)[0], signal.SIGSTOP)
        wait_until(lambda: "suspect" in states(server), "it is noticed")
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200

    assert follow_all(server, STREAMS, stop) == undisturbed
    os.kill(engines(server)[0], signal.SIGCONT)
    wait_well(server)
    assert metric(server.url, "sglang:engine_replacements_total") == before


def test_a_killed_front_costs_no_stream_of_the_other_a_token(server):
    wait_well(server)
    expected = httpx.post(f"{server.url}/generate", json=BODY, timeout=PATIENCE_S).json()["output_ids"]
    kill_front(server, BODY, expected)


def operate(server: ServerProcess, verb: str, number: int) -> httpx.Response:
    return httpx.post(f"{server.url}/replicas/{verb}", json={"replica": number}, timeout=PATIENCE_S)


def test_replicas_are_restarted_drained_and_given_weights_under_streams(server, undisturbed):
    before = engines(server)
    info = httpx.get(f"{server.url}/get_model_info", timeout=PATIENCE_S).json()
    weights = {"model_path": info["model_path"], "weight_version": "again", "rolling": True}

    def disturb() -> None:
        for number in (0, 1):
            assert operate(server, "restart", number).json()["engine"] == "healthy"
        assert operate(server, "drain", 1).json()["drained"] is True
        assert operate(server, "undrain", 1).json()["drained"] is False
        answer = httpx.post(f"{server.url}/update_weights_from_disk", json=weights, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text

    assert follow_all(server, STREAMS, disturb) == undisturbed
    assert not set(before) & set(engines(server))
    short = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    output = httpx.post(f"{server.url}/generate", json=short, timeout=PATIENCE_S)
    assert output.json()["meta_info"]["weight_version"] == "again"
    answer = operate(server, "restart", 2)
    assert answer.status_code == 400
    assert "at most 1, got 2" in answer.text
