"""The real server with a model over two ranks, one of which is killed: every output is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from followers import PATIENCE_S, follow_all, streams, wait_until, wait_well
from server_process import ServerProcess, command_line, metric
from tiny_adapters import write_adapter
from tiny_models import write

pytestmark = pytest.mark.e2e

STREAMS = streams(40)


def ranks(server: ServerProcess) -> list[int]:
    """The processes of all ranks but the first: children of the server, or of its engine's process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and "tureen.runner.rank_child" in command_line(int(entry.name)):
            parents = _ancestors(int(entry.name))
            found += [int(entry.name)] if server.process.pid in parents else []
    return found


def _ancestors(pid: int) -> list[int]:
    parents = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        parents.append(pid)
    return parents


@pytest.fixture(scope="module", params=["auto"])
def server(request, tmp_path_factory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model")
    model = write(folder, "llama", vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS)
    make_byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    write_adapter(model, folder / "adapter")
    settings = ("--tensor-parallel-size", "2", "--engine", request.param, "--dtype", "float32", "--num-threads", "1")
    limits = ("--grammar-compile-timeout-s", "120", "--context-length", "512")
    with ServerProcess("--model-path", str(folder), *settings, *limits) as running:
        running.wait_ready()
        body = {"lora_name": "late", "lora_path": str(folder / "adapter")}
        assert httpx.post(f"{running.url}/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 200
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
