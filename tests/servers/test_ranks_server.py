"""The real server with a model over several ranks, one of which is killed: every output is that of an undisturbed
run. Each rank has a part of every layer, or some of the layers."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny_llava
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from decoys import Decoys, imported_by_python
from followers import PATIENCE_S, follow_all, follow_through_death, streams, wait_until, wait_well
from server_process import ServerProcess, command_line, metric
from tiny_adapters import write_adapter
from tiny_models import write

pytestmark = pytest.mark.e2e

STREAMS = streams(40)
NUM_RANKS = {"--tensor-parallel-size": 2, "--pipeline-parallel-size": 3}


@pytest.fixture(scope="module", params=NUM_RANKS)
def flag(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with three layers, and an adapter of it."""
    folder = tmp_path_factory.mktemp("model")
    model = write(folder, "llama", num_hidden_layers=3, vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS)
    make_byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    write_adapter(model, folder / "adapter")
    return folder


def start(folder: Path, flag: str, *more: str, cwd: Path | None = None) -> ServerProcess:
    """Returns a server, soon to be ready, of which the adapter has the name `late`."""
    limits = ("--grammar-compile-timeout-s", "120", "--context-length", "512", "--dtype", "float32")
    ranks = (flag, str(NUM_RANKS[flag]), "--num-threads", "1", "--lora-paths", f"late={folder / 'adapter'}")
    return ServerProcess("--model-path", str(folder), *ranks, *limits, *more, cwd=cwd)


@pytest.fixture(scope="module")
def server(flag, folder, tmp_path_factory) -> Iterator[ServerProcess]:
    decoys = Decoys(tmp_path_factory.mktemp("here"), without=imported_by_python())
    with start(folder, flag, cwd=decoys.folder) as running:
        yield running.wait_ready()
    assert decoys.imported == []


def test_a_rank_that_is_killed_loses_nothing_of_eight_streams(server):
    undisturbed = follow_all(server, STREAMS)
    killed: list[int] = []

    def kill() -> None:
        killed.append(min(ranks(server)))  # of three stages it is the one in the middle
        os.kill(killed[-1], signal.SIGKILL)

    assert follow_through_death(lambda: follow_all(server, STREAMS, kill), server, 1) == undisturbed
    wait_well(server)
    assert not set(killed) & set(ranks(server))


def test_an_engine_that_has_nothing_to_do_is_replaced_when_a_rank_dies(server, flag):
    before = metric(server.url, "sglang:engine_replacements_total")
    os.kill(max(ranks(server)), signal.SIGKILL)
    wait_until(lambda: metric(server.url, "sglang:engine_replacements_total") > before, "it is noticed")
    wait_well(server)
    assert len(ranks(server)) == NUM_RANKS[flag] - 1


def test_what_no_rank_has_all_of_is_refused_by_name(server, flag):
    bodies = {"get_weights_by_name": {"name": "model.norm.weight"}}
    if flag == "--pipeline-parallel-size":
        bodies["start_expert_distribution_record"] = {}
    for path, body in bodies.items():
        response = httpx.post(f"{server.url}/{path}", json=body, timeout=PATIENCE_S)
        assert response.status_code == 400
        assert flag in response.text


def test_replicas_have_ranks_of_their_own_and_go_on_with_what_one_of_them_had(server, flag, folder):
    undisturbed = follow_all(server, STREAMS)
    with start(folder, flag, "--replicas", "2") as replicas:
        replicas.wait_ready()
        assert len(ranks(replicas)) == 2 * (NUM_RANKS[flag] - 1)

        def kill() -> None:
            os.kill(min(ranks(replicas)), signal.SIGKILL)

        assert follow_through_death(lambda: follow_all(replicas, STREAMS, kill), replicas, 1) == undisturbed


def test_a_model_that_sees_says_over_stages_what_it_says_in_one_process(tmp_path):
    tiny_llava.write(tmp_path, "llava-clip")
    tiny_llava.write_tokenizer(tmp_path)
    picture = io.BytesIO()
    tiny_llava.picture(60, 40).save(picture, "PNG")
    body = {
        "text": "<image>a",
        "image_data": base64.b64encode(picture.getvalue()).decode(),
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
    }
    said = []
    for flags in (("--kernels", "torch"), ("--pipeline-parallel-size", "2")):
        alike = ("--dtype", "float32", "--num-threads", "1", "--device", "cpu", "--context-length", "128")
        with ServerProcess("--model-path", str(tmp_path), *flags, *alike) as running:
            running.wait_ready()
            answer = httpx.post(f"{running.url}/generate", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            said.append(answer.json()["meta_info"]["output_token_logprobs"])
    assert said[0] == said[1]


def test_no_rank_outlives_a_server_that_is_killed(server):
    left = ranks(server)
    assert left
    server.process.kill()
    wait_until(lambda: not any("rank_child" in command_line(pid) for pid in left), "they end")


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
