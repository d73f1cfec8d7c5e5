"""The real server with two fronts over two engines: whichever process dies, clients get the tokens of an undisturbed
run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from decoys import Decoys, imported_by_python
from followers import PATIENCE_S, TEXT, engines, follow_through_death, states, wait_until
from front_streams import NUM_STREAMS, Stream, begin, kill_front, status
from server_process import ServerProcess

pytestmark = pytest.mark.e2e

PARAMS = {"max_new_tokens": 250, "temperature": 0.8, "ignore_eos": True, "sampling_seed": 5}
BODY = {"text": TEXT, "sampling_params": PARAMS}


@pytest.fixture(scope="module")
def server(default_model_source, tmp_path_factory) -> Iterator[ServerProcess]:
    decoys = Decoys(tmp_path_factory.mktemp("here"), without=imported_by_python())
    patient = "--freeze-grace-s", str(PATIENCE_S)
    with ServerProcess("--api-workers", "2", "--replicas", "2", *patient, cwd=decoys.folder) as running:
        yield running.wait_ready()
    assert decoys.imported == []


@pytest.fixture(scope="module")
def expected(server) -> list[int]:
    return httpx.post(f"{server.url}/generate", json=BODY, timeout=PATIENCE_S).json()["output_ids"]


def operate(server, path: str, **body) -> dict:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_replica_loses_nothing_of_the_streams_of_both_fronts(server, expected, number):
    def follow() -> None:
        wait_until(lambda: states(server) == ["healthy", "healthy"], "both are well")
        streams = begin(server, BODY)
        os.kill(engines(server)[number], signal.SIGKILL)
        assert [stream.join().ids for stream in streams] == [expected] * len(streams)

    follow_through_death(follow, server, 1)
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it is replaced")


def test_a_killed_front_takes_its_own_streams_along_and_no_others(server, expected):
    kill_front(server, BODY, expected)
    again = begin(server, BODY)
    assert [stream.join().ids for stream in again] == [expected] * len(again)


def test_a_drained_replica_is_given_nothing_by_any_front(server, expected):
    streams = begin(server, BODY)
    assert operate(server, "/replicas/drain", replica=1)["drained"] is True
    wait_until(lambda: status(server)["models"][0]["replicas"][1]["num_running"] == 0, "its requests go on elsewhere")
    more = [Stream(lambda: httpx.Client(base_url=server.url, timeout=PATIENCE_S), BODY) for _ in range(NUM_STREAMS)]
    for stream in more:
        assert stream.begun.wait(PATIENCE_S)
    assert status(server)["models"][0]["replicas"][1]["num_running"] == 0
    assert [stream.join().ids for stream in streams + more] == [expected] * len(streams + more)
    assert operate(server, "/replicas/undrain", replica=1)["drained"] is False


def test_all_replicas_are_restarted_one_after_the_other_under_streams_of_both_fronts(server, expected):
    before = engines(server)
    streams = begin(server, BODY)
    for number in (0, 1):
        assert operate(server, "/replicas/restart", replica=number)["engine"] == "healthy"
    assert [stream.join().ids for stream in streams] == [expected] * len(streams)
    assert not {*before} & {*engines(server)}


def test_weights_are_exchanged_under_streams_of_both_fronts(server, expected):
    path = httpx.get(f"{server.url}/get_model_info", timeout=PATIENCE_S).json()["model_path"]
    streams = begin(server, BODY)
    answer = operate(server, "/update_weights_from_disk", model_path=path, weight_version="again", rolling=True)
    assert "restarted_replicas" not in answer
    assert [stream.join().ids for stream in streams] == [expected] * len(streams)
    again = begin(server, BODY)
    assert [stream.join().ids for stream in again] == [expected] * len(again)
    short = BODY | {"sampling_params": PARAMS | {"max_new_tokens": 1}}
    answers = [httpx.post(f"{server.url}/generate", json=short, timeout=PATIENCE_S).json() for _ in range(NUM_STREAMS)]
    assert {each["meta_info"]["weight_version"] for each in answers} == {"again"}


def test_a_stopped_replica_is_noticed_by_every_front(server, expected):
    streams = begin(server, BODY)
    pid = engines(server)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [stream.join().ids for stream in streams] == [expected] * len(streams)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: states(server) == ["healthy", "healthy"], "it answers")
    assert engines(server)[0] == pid
    again = begin(server, BODY)
    assert [stream.join().ids for stream in again] == [expected] * len(again)
