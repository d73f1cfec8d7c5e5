"""The real server with two fronts over two engines: whichever process dies or stops, clients get the tokens of an
undisturbed run. tests/serving/test_fronts_with_replicas.py simulates each moment of it, drains and restarts."""

from __future__ import annotations

import os
import signal

import httpx
from decoys import Decoys, imported_by_python
from followers import PATIENCE_S, TEXT, engines, follow_through_death, states, wait_until
from front_streams import begin, kill_front
from server_process import ServerProcess

PARAMS = {"max_new_tokens": 60, "temperature": 0.8, "ignore_eos": True, "sampling_seed": 5}
BODY = {"text": TEXT, "sampling_params": PARAMS}


def test_a_killed_replica_a_stopped_one_and_a_killed_front_cost_no_other_stream_a_token(default_model_source, tmp_path):
    decoys = Decoys(tmp_path, without=imported_by_python())
    patient = "--freeze-grace-s", str(PATIENCE_S)
    with ServerProcess("--api-workers", "2", "--replicas", "2", *patient, cwd=decoys.folder) as server:
        server.wait_ready()
        expected = httpx.post(f"{server.url}/generate", json=BODY, timeout=PATIENCE_S).json()["output_ids"]

        def follow(sign: signal.Signals) -> int:
            wait_well(server)
            streams, pid = begin(server, BODY), engines(server)[0]
            os.kill(pid, sign)
            assert [stream.join().ids for stream in streams] == [expected] * len(streams)
            return pid

        follow_through_death(lambda: follow(signal.SIGKILL), server, 1)
        stopped = follow(signal.SIGSTOP)
        os.kill(stopped, signal.SIGCONT)
        wait_well(server)
        assert stopped in engines(server)
        kill_front(server, BODY, expected)
        again = begin(server, BODY)
        assert [stream.join().ids for stream in again] == [expected] * len(again)
    assert decoys.imported == []


def wait_well(server: ServerProcess) -> None:
    wait_until(lambda: states(server) == ["healthy", "healthy"], "both are well")
