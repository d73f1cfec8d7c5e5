"""The blocks of pages about replicas, other weights and experts, on a small model of experts with two replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from page_blocks import block_with
from page_commands import check_statuses, commands, run
from real_app import write_model
from server_process import ServerProcess

GUARDS = ("docs/scaling.md", "docs/operations.md", "data_parallel", "serving", "runner", "weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a model, and other weights of it where the pages look for them."""
    folder = tmp_path_factory.mktemp("weights")
    write_model(folder / "model", 1, "mixtral")
    write_model(folder / "checkpoints" / "step-200", 2, "mixtral")
    return folder


@pytest.fixture(scope="module")
def replicas(folder) -> Iterator[ServerProcess]:
    flags = ("--replicas", "2", "--num-threads", "1", "--max-total-tokens", "2048")
    with ServerProcess("--model-path", str(folder / "model"), *flags, cwd=folder) as running:
        yield running.wait_ready()


def generate(server: ServerProcess) -> dict:
    body = {"input_ids": [9, 10, 11, 12], "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=240).raise_for_status().json()


def test_a_replica_is_restarted_drained_and_used_again(replicas, tmp_path):
    before = generate(replicas)["output_ids"]
    check_statuses(block_with("scaling.md", "/replicas/undrain"), replicas, tmp_path)
    [model] = httpx.get(f"{replicas.url}/status").json()["models"]
    assert [(replica["engine"], replica["drained"]) for replica in model["replicas"]] == [("healthy", False)] * 2
    assert generate(replicas)["output_ids"] == before


def test_tokens_of_experts_are_counted_between_start_and_stop(replicas, tmp_path):
    start, stop, dump = commands(block_with("operations.md", "/dump_expert_distribution_record"), replicas)
    run(start, tmp_path)
    num_tokens = 4 + len(generate(replicas)["output_ids"]) - 1
    run(stop, tmp_path)
    generate(replicas)
    layers = json.loads(run(dump, tmp_path))["layers"]
    assert [sum(layer["counts"]) for layer in layers] == [2 * num_tokens] * len(layers)  # two experts a token


@pytest.mark.parametrize(("page", "words"), [("scaling.md", '"rolling": true'), ("operations.md", "checkpoints/step")])
def test_other_weights_answer_under_their_name(replicas, folder, tmp_path, page, words):
    old = {"model_path": str(folder / "model"), "weight_version": "old"}
    assert httpx.post(f"{replicas.url}/update_weights_from_disk", json=old, timeout=240).status_code == 200
    before = generate(replicas)
    check_statuses(block_with(page, words), replicas, tmp_path)
    after = generate(replicas)
    assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("old", "step-200")
    assert after["output_ids"] != before["output_ids"]
