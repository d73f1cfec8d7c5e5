"""The real server with a model over several ranks, one of which is killed: every output is that of an undisturbed
run. Each rank has a part of every layer, or some of the layers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from followers import follow_all, follow_through_death, streams, wait_until, wait_well
from server_process import ServerProcess, command_line, metric
from tiny_adapters import write_adapter
from tiny_models import write

STREAMS = streams(32)
NUM_OTHERS = {"parts of layers": 1, "some of the layers": 2}
"""Ranks beside the first one."""

SETTINGS = {
    "parts of layers": ("--tensor-parallel-size", "2", "--engine", "process"),
    "some of the layers": ("--pipeline-parallel-size", "3", "--engine", "process"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with three layers, and an adapter of it."""
    folder = tmp_path_factory.mktemp("model")
    model = write(folder, "llama", num_hidden_layers=3, vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS)
    make_byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    write_adapter(model, folder / "adapter")
    return folder


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_rank_that_is_killed_loses_nothing_and_none_outlives_its_server(folder, kind):
    limits = ("--grammar-compile-timeout-s", "120", "--context-length", "512", "--dtype", "float32")
    more = ("--num-threads", "1", "--lora-paths", f"late={folder / 'adapter'}")
    with ServerProcess("--model-path", str(folder), *SETTINGS[kind], *limits, *more) as server:
        server.wait_ready()
        undisturbed = follow_all(server, STREAMS)
        assert len(ranks(server)) == NUM_OTHERS[kind]
        killed: list[int] = []

        def kill() -> None:
            killed.append(min(ranks(server)))  # of three stages it is the one in the middle
            os.kill(killed[-1], signal.SIGKILL)

        assert follow_through_death(lambda: follow_all(server, STREAMS, kill), server, 1) == undisturbed
        wait_until(lambda: len(ranks(server)) == NUM_OTHERS[kind], "all ranks are there")
        wait_well(server)
        left = ranks(server)
        assert not {*killed} & {*left}
        if kind == "parts of layers":
            kill_while_idle(server, left[0])
        server.process.kill()
        wait_until(lambda: not any("rank_child" in command_line(pid) for pid in left), "they end")


def kill_while_idle(server: ServerProcess, rank: int) -> None:
    """Kill a rank of an engine that has nothing to do: no exchange breaks."""
    before = metric(server.url, "sglang:engine_replacements_total")
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: metric(server.url, "sglang:engine_replacements_total") > before, "it is noticed")


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
