"""The real server with a model over three stages, one of which is killed while another waits for it."""

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
    with serving(tmp_path_factory.mktemp("model"), "--pipeline-parallel-size", "3") as running:
        yield running


def test_a_stage_in_the_middle_that_is_killed_loses_nothing_of_eight_streams(server):
    undisturbed = follow_all(server, STREAMS)
    before = metric(server.url, "sglang:engine_replacements_total")
    middle, _ = sorted(ranks(server))
    assert follow_all(server, STREAMS, lambda: os.kill(middle, signal.SIGKILL)) == undisturbed
    wait_well(server)
    assert metric(server.url, "sglang:engine_replacements_total") == before + 1
    assert metric(server.url, "sglang:num_resumed_requests_total") > 0
    assert middle not in ranks(server)


@pytest.mark.parametrize(
    ("path", "body"), [("get_weights_by_name", {"name": "model.norm.weight"}), ("start_expert_distribution_record", {})]
)
def test_what_no_stage_has_all_of_is_refused_by_name(server, path, body):
    response = httpx.post(f"{server.url}/{path}", json=body, timeout=PATIENCE_S)
    assert response.status_code == 400
    assert "--pipeline-parallel-size" in response.text


def test_no_stage_outlives_a_server_that_is_killed(server):
    left = ranks(server)
    assert len(left) == 2
    server.process.kill()
    wait_until(lambda: not any("rank_child" in command_line(pid) for pid in left), "they end")
