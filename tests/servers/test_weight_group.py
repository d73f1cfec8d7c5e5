"""A trainer broadcasts weights in a process group over gloo: processes are needed, because one of them dies."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from real_app import RealThreadedApp, write_model
from safetensors.numpy import load_file
from tiny_models import greedy

TRAINER = Path(__file__).with_name("gloo_trainer.py")
PROMPT = [17, 4, 99, 120, 33, 8, 250, 61, 7, 7, 12, 90, 200, 31, 5, 66, 1]
PARAMS = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return root, {name: write_model(root / name, seed) for name, seed in (("red", 1), ("blue", 2))}


@pytest.fixture
def app(models):
    with RealThreadedApp(models[0] / "red", kernels="torch", max_total_tokens=256) as running:
        yield running


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(models, kind, group="g"):
    port = free_port()
    command = [sys.executable, str(TRAINER), str(port), group, str(models[0] / "blue" / "model.safetensors"), kind]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    join = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
    return process, join | {"group_name": group, "backend": "gloo"}


def status(trainer):
    """Ends a trainer that has done its part."""
    text, _ = trainer.communicate(timeout=60)
    return trainer.returncode, text


def announced(models):
    tensors = load_file(models[0] / "blue" / "model.safetensors")
    names = sorted(tensors)
    shapes = [list(tensors[name].shape) for name in names]
    return {"names": names, "dtypes": ["float32"] * len(names), "shapes": shapes, "group_name": "g"}


def output(app):
    return app.generate(input_ids=PROMPT, sampling_params=PARAMS)["output_ids"]


def test_what_a_trainer_broadcasts_in_one_piece_is_served(app, models):
    trainer, join = train(models, "flattened_bucket")
    assert app.post("/init_weights_update_group", **join).json()["success"]
    fields = announced(models) | {"load_format": "flattened_bucket", "weight_version": "b", "flush_cache": False}
    answer = app.post("/update_weights_from_distributed", **fields)
    assert answer.json()["success"], answer.text
    assert output(app) == greedy(models[1]["blue"], PROMPT, 12)
    assert status(trainer) == (0, "")
    assert app.post("/destroy_weights_update_group", group_name="g").json()["success"]
    assert app.post("/destroy_weights_update_group", group_name="g").json()["success"] is False


def test_vllm_s_forms_do_the_same(app, models):
    trainer, join = train(models, "each", "weight_update_group")
    info = {name: join[name] for name in ("master_address", "rank_offset", "world_size", "backend")}
    app.post("/init_weight_transfer_engine", init_info=info | {"master_port": int(join["master_port"])})
    fields = announced(models)
    assert app.post("/start_weight_update").json()["message"] == "Weight update started"
    update = {"names": fields["names"], "dtype_names": fields["dtypes"], "shapes": fields["shapes"]}
    assert app.post("/update_weights", update_info=update).json()["num_missing"] == 0
    assert output(app) == greedy(models[1]["red"], PROMPT, 12)
    assert app.post("/finish_weight_update", weight_version="b").status_code == 200
    assert output(app) == greedy(models[1]["blue"], PROMPT, 12)
    assert status(trainer) == (0, "")


def test_a_trainer_that_dies_in_the_middle_changes_nothing_and_another_can_begin(app, models):
    trainer, join = train(models, "dies")
    assert app.post("/init_weights_update_group", **join).status_code == 200
    answer = app.post("/update_weights_from_distributed", **announced(models))
    assert (answer.status_code, answer.json()["success"]) == (503, False)
    assert answer.json()["error"]["code"] == "group_lost"
    assert status(trainer)[0] == 3
    assert output(app) == greedy(models[1]["red"], PROMPT, 12)
    trainer, join = train(models, "each")
    assert app.post("/init_weights_update_group", **join).status_code == 200
    assert app.post("/update_weights_from_distributed", **announced(models)).status_code == 200
    assert output(app) == greedy(models[1]["blue"], PROMPT, 12)
    assert status(trainer) == (0, "")


def test_an_update_that_is_refused_ends_the_trainer_s_broadcast(app, models):
    trainer, join = train(models, "each")
    assert app.post("/init_weights_update_group", **join).status_code == 200
    fields = announced(models)
    fields["names"][3] = "model.nor.weight"
    answer = app.post("/update_weights_from_distributed", **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_weight")
    assert status(trainer)[0] == 4
    assert output(app) == greedy(models[1]["red"], PROMPT, 12)


def test_requests_are_answered_while_a_trainer_is_awaited(app, models):
    async def scenario():
        port = free_port()
        join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joining = asyncio.create_task(app.http.post("/init_weights_update_group", json=join | {"backend": "gloo"}))
        answer = await app.http.post("/generate", json={"input_ids": PROMPT, "sampling_params": PARAMS})
        assert not joining.done()
        await app.http.post("/destroy_weights_update_group", json={})
        return answer.json(), (await joining).json()

    answer, joined = app.run(scenario())
    assert answer["output_ids"] == greedy(models[1]["red"], PROMPT, 12)
    assert joined["error"]["code"] == "group_lost"
