"""The real server with a model over two ranks, one of which is killed: every output is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from followers import PATIENCE_S, follow_all, streams, wait_until, wait_well
from rank_processes import ranks, serving
from server_process import ServerProcess, command_line, metric

pytestmark = pytest.mark.e2e

STREAMS = streams(40)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("model"), "--tensor-parallel-size", "2") as running:
        yield running


def test_a_rank_that_is_killed_loses_nothing_of_eight_streams(server):
    undisturbed = follow_all(server, STREAMS)
    before = metric(server.url, "sglang:engine_replacements_total")
    (rank,) = ranks(server)
    assert follow_all(server, STREAMS, lambda: os.kill(rank, signal.SIGKILL)) == undisturbed
    wait_well(server)
    assert metric(server.url, "sglang:engine_replacements_total") == before + 1
    assert metric(server.url, "sglang:num_resumed_requests_total") > 0
    assert rank not in ranks(server)


def test_an_engine_that_has_nothing_to_do_is_replaced_when_a_rank_dies(server):
    before = metric(server.url, "sglang:engine_replacements_total")
    (rank,) = ranks(server)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: metric(server.url, "sglang:engine_replacements_total") > before, "it is noticed")
    wait_well(server)
    assert len(ranks(server)) == 1


def test_what_no_rank_has_all_of_is_refused_by_name(server):
    body = {"name": "model.norm.weight"}
    response = httpx.post(f"{server.url}/get_weights_by_name", json=body, timeout=PATIENCE_S)
    assert response.status_code == 400
    assert "--tensor-parallel-size" in response.text


def test_no_rank_outlives_a_server_that_is_killed(server):
    left = ranks(server)
    assert left
    server.process.kill()
    wait_until(lambda: not any("rank_child" in command_line(pid) for pid in left), "they end")
