"""Counts of the tokens that each expert takes, against the routers of transformers in float32."""

from __future__ import annotations

import pytest
import torch
from real_app import RealApp, write_model

from tureen.kernels.cpu import native

PARAMS = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
PROMPTS = [list(range(9, 9 + 20)), [200, 3, 77, 150, 61], [17]]
VARIANTS = ["mixtral", "qwen2-moe", "qwen3-moe"]
ROUTES = [f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")]


@pytest.fixture(scope="module", params=VARIANTS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_model(folder, 1, request.param)


@pytest.fixture(scope="module", params=["native", "torch"])
def app(request, model):
    if request.param == "native" and native.load() is None:
        pytest.skip("no native kernels")
    with RealApp(model[0], kernels=request.param, num_threads=2) as app:
        yield app


def generate(app):
    app.post("/flush_cache")
    return app.generate(input_ids=PROMPTS, sampling_params=PARAMS)


@torch.no_grad()
def expected(oracle, sequences):
    """{layer: tokens by expert}, by the logits of the oracle's routers."""
    config = oracle.config
    dense = getattr(config, "mlp_only_layers", None) or []
    layers = [layer for layer in range(config.num_hidden_layers) if layer not in dense]
    count = getattr(config, "num_local_experts", None) or config.num_experts
    counts = {layer: torch.zeros(count, dtype=torch.int64) for layer in layers}
    for tokens in sequences:
        logits = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
        for layer, rows in zip(layers, logits, strict=True):
            chosen = rows.reshape(len(tokens), count).topk(config.num_experts_per_tok).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=count)
    return {layer: row.tolist() for layer, row in counts.items()}


def computed(answers):
    """The last token of an output is drawn, not computed."""
    return [prompt + answer["output_ids"][:-1] for prompt, answer in zip(PROMPTS, answers, strict=True)]


def dump(app):
    answer = app.post("/dump_expert_distribution_record")
    assert answer.status_code == 200
    return {layer["layer_id"]: layer["counts"] for layer in answer.json()["layers"]}


def test_every_expert_of_every_layer_counts_the_tokens_that_the_float32_router_gives_it(app, model):
    plain = generate(app)
    assert app.post("/start_expert_distribution_record").status_code == 200
    recorded = generate(app)
    assert app.post("/stop_expert_distribution_record").status_code == 200
    generate(app)  # nobody counts
    assert [one["output_ids"] for one in recorded] == [one["output_ids"] for one in plain]
    assert dump(app) == expected(model[1], computed(recorded))
    assert not any(map(sum, dump(app).values()))


def test_counts_are_taken_while_the_counting_goes_on_and_a_new_start_begins_from_zero(app, model):
    app.post("/start_expert_distribution_record")
    generate(app)
    app.post("/start_expert_distribution_record")
    counts = expected(model[1], computed(generate(app)))
    assert dump(app) == counts
    generate(app)
    assert dump(app) == counts
    app.post("/stop_expert_distribution_record")


def test_a_second_end_is_refused_and_so_are_other_weights_while_experts_are_counted(app, model):
    app.post("/start_expert_distribution_record")
    refused = app.post("/update_weights_from_disk", model_path=str(model[0]))
    assert refused.status_code == 409, refused.text
    assert "/stop_expert_distribution_record" in refused.json()["error"]["message"]
    assert app.post("/stop_expert_distribution_record").status_code == 200
    assert app.post("/stop_expert_distribution_record").status_code == 409


def test_a_model_without_experts_says_so(tmp_path):
    write_model(tmp_path, 1)
    with RealApp(tmp_path) as app:
        for route in ROUTES:
            refused = app.post(route)
            assert refused.status_code == 400, route
            assert "has no experts" in refused.json()["error"]["message"], route


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_transformers_runs_says_that_its_experts_cannot_be_counted(model):
    with RealApp(model[0], model_impl="transformers") as app:
        for route in ROUTES:
            refused = app.post(route)
            assert refused.status_code == 400
            assert "--model-impl transformers" in refused.json()["error"]["message"]
        assert generate(app), "what is refused changes nothing"
