"""Metadata and tensors of GGUF files with Mamba 2 layers. tests/models/test_architectures.py compares what they
compute."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_gguf

from tureen.errors import StartupError
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import iter_stored, to_float32

SIZES = {"ssm__conv_kernel": 4, "ssm__state_size": 8, "ssm__group_count": 2, "ssm__inner_size": 128,
         "ssm__time_step_rank": 8}  # fmt: skip
KIND = {"attention__head_count_kv": [0, 2, 0], "block_count": 3}
GRANITE = SIZES | KIND | {"logit_scale": 2.0, "rope__scaling__finetuned": False}
NEMOTRON = SIZES | KIND | {"feed_forward_length": [0, 0, 96], "attention__key_length": 32}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 96, "expert_weights_norm": True,
           "expert_shared_count": 1, "expert_shared_feed_forward_length": 48, "expert_weights_scale": 2.5}  # fmt: skip
FACTS = {
    "falcon-h1": SIZES,
    "granitehybrid": GRANITE,
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON | EXPERTS,
}
HEAD = {name: np.zeros((256, 64), np.float32) for name in ("token_embd.weight", "output.weight")}


def _source(tmp_path, architecture, facts=None, tensors=None):
    metadata = tiny_gguf.architecture_metadata(architecture, **FACTS[architecture] | (facts or {}))
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", metadata, HEAD if tensors is None else tensors)
    return ModelSource("m", path, "gguf")


SSM = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size", "ssm.time_step_rank")


@pytest.mark.parametrize("key", SSM)
@pytest.mark.parametrize("architecture", FACTS)
def test_a_size_of_mamba_layers_that_is_missing_or_no_count_is_refused_by_its_key(tmp_path, architecture, key):
    for value in (None, 0, -1.5, 1 << 31, True, "4", [4, 8, 4], ["a"]):
        with pytest.raises(StartupError) as caught:
            model_config(_source(tmp_path, architecture, {key.replace(".", "__"): value}))
        assert f"{architecture}.{key}" in caught.value.message


@pytest.mark.parametrize("architecture", FACTS)
@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"ssm__inner_size": 192, "ssm__time_step_rank": 128}, "ssm.inner_size 192 is not a multiple of ssm.time_step"),
        ({"ssm__group_count": 3}, "ssm.time_step_rank 8 is not a multiple of ssm.group_count, 3"),
        ({"ssm__dt_b_c_rms": True}, "ssm.dt_b_c_rms is unknown and may change what the model computes"),
        ({"block_count": 1 << 30}, "block_count must be at most 4096, got 1073741824"),
    ],
)
def test_sizes_that_do_not_fit_and_unknown_keys_are_refused(tmp_path, architecture, facts, fault):
    with pytest.raises(StartupError) as caught:
        model_config(_source(tmp_path, architecture, facts))
    assert f"{architecture}.{fault}" in caught.value.message


NOT_COUNTS = r"must have one positive integer, or 0, for each layer"


@pytest.mark.parametrize(
    ("architecture", "facts", "fault"),
    [
        ("granitehybrid", {"attention__head_count_kv": 2}, r"head_count_kv must have a number for each of 3 layers"),
        ("granitehybrid", {"attention__head_count_kv": [0, 2]}, r"head_count_kv must have a number for each of 3"),
        ("granitehybrid", {"attention__head_count_kv": [0, 0, 0]}, rf"head_count_kv {NOT_COUNTS}"),
        ("granitehybrid", {"attention__head_count_kv": [0, 1, 2]}, rf"head_count_kv {NOT_COUNTS}"),
        ("granitehybrid", {"ssm__inner_size": 96}, r"ssm\.inner_size 96 is not a multiple of embedding_length, 64"),
        ("granitehybrid", {"rope__scaling__finetuned": True}, r"finetuned must be false.*Bamba.*safetensors"),
        ("granitehybrid", {"rope__scaling__finetuned": None}, r"granitehybrid\.rope\.scaling\.finetuned must be false"),
        ("granitehybrid", {"expert_count": 8, "expert_used_count": 2}, r"expert_shared_feed_forward_length must be a"),
        ("nemotron_h", {"feed_forward_length": 96}, r"h\.feed_forward_length must have a number for each of 3"),
        ("nemotron_h", {"feed_forward_length": [0, 96]}, r"feed_forward_length must have a number for each of 3"),
        ("nemotron_h", {"feed_forward_length": [64, 0, 96]}, rf"nemotron_h\.feed_forward_length {NOT_COUNTS}"),
        ("nemotron_h", {"feed_forward_length": [0.0, 0.0, 96.0]}, rf"nemotron_h\.feed_forward_length {NOT_COUNTS}"),
        ("nemotron_h", {"feed_forward_length": [0, 96, 0]}, r"head_count_kv and feed_forward_length are both set for"),
        ("nemotron_h", {"attention__key_length": None}, r"nemotron_h\.attention\.key_length must be a positive"),
        ("nemotron_h", {"attention__value_length": 16}, r"attention\.value_length must be attention\.key_length, 32"),
        ("nemotron_h", {"attention__scale": 0.5}, r"nemotron_h\.attention\.scale must be 0\.176777, got 0\.5"),
        ("nemotron_h", {"expert_count": 8}, r"mixture of experts \(nemotron_h\.expert_count\)"),
        ("nemotron_h_moe", {"expert_count": None}, r"nemotron_h_moe\.expert_count must be a positive integer"),
        ("nemotron_h_moe", {"expert_count": 1 << 20}, r"nemotron_h_moe\.expert_count must be at most 4096, got"),
        ("nemotron_h_moe", {"expert_gating_func": 1}, r"nemotron_h_moe\.expert_gating_func 1 is not supported"),
        ("nemotron_h_moe", {"expert_shared_count": 2}, r"nemotron_h_moe\.expert_shared_count 2 is not supported"),
        ("nemotron_h_moe", {"expert_weights_norm": "yes"}, r"expert_weights_norm must be true or false, got 'yes'"),
        ("nemotron_h_moe", {"expert_group_count": 4}, r"expert_group_used_count must be a positive integer, got null"),
        ("nemotron_h_moe", {"expert_shared_feed_forward_length": None}, r"expert_shared_feed_forward_length must be a"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, r"moe_latent_size\), as in Nemotron 3 Super.*take Nemotron 3 Nano"),
        ("falcon-h1", {"attention__head_count_kv": [2, 0]}, r"falcon-h1\.attention\.head_count_kv differs from layer"),
        ("falcon-h1", {"expert_count": 8}, r"mixture of experts \(falcon-h1\.expert_count\)"),
    ],
)  # fmt: skip
def test_a_file_that_another_model_could_have_is_refused_by_the_key(tmp_path, architecture, facts, fault):
    with pytest.raises(StartupError, match=fault):
        model_config(_source(tmp_path, architecture, facts))


def test_a_falcon_h1_file_without_a_head_of_its_own_is_refused_for_the_scale_of_its_logits_is_unknown(tmp_path):
    tensors = {"token_embd.weight": HEAD["token_embd.weight"]}
    with pytest.raises(StartupError, match=r"'output\.weight' is missing.*take the model's safetensors"):
        model_config(_source(tmp_path, "falcon-h1", tensors=tensors))


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [("nemotron_h", ["mamba", "attention", "mlp"]), ("nemotron_h_moe", ["mamba", "attention", "moe"])],
)
def test_a_layer_without_key_heads_and_inner_size_is_mamba_s_and_one_that_guesses_ahead_is_left_out(
    tmp_path, architecture, kinds
):
    ahead = {"block_count": 4, "nextn_predict_layers": 1, "attention__head_count_kv": [0, 2, 0, 2],
             "feed_forward_length": [0, 0, 96, 96]}  # fmt: skip
    for facts in ({}, ahead):
        assert model_config(_source(tmp_path, architecture, facts))["layers_block_type"] == kinds


@pytest.mark.parametrize(("is_finetuned", "position"), [(True, "rope"), (False, "nope"), (None, "rope")])
def test_a_granitehybrid_file_of_attention_alone_needs_no_sizes_of_mamba_layers(tmp_path, is_finetuned, position):
    facts = dict.fromkeys(SIZES) | {"attention__head_count_kv": [2, 2, 2], "rope__scaling__finetuned": is_finetuned}
    config = model_config(_source(tmp_path, "granitehybrid", facts))
    assert config["layer_types"] == ["attention"] * 3
    assert config["position_embedding_type"] == position


@pytest.mark.parametrize("architecture", FACTS)
def test_norms_of_groups_are_one_vector_and_decays_are_logarithms(tmp_path, architecture):
    norm = np.arange(128, dtype=np.float32)
    tensors = HEAD | {
        "blk.0.ssm_norm.weight": norm.reshape(2, 64),
        "blk.0.ssm_a": -np.exp(np.arange(8, dtype=np.float32))[:, None],
    }
    source = _source(tmp_path, architecture, tensors=tensors)
    stored = {one.name.rpartition("layers.0.m")[2]: one for one in iter_stored(source, model_config(source))}
    block = "ixer" if architecture.startswith("nemotron") else "amba"
    assert stored[f"{block}.norm.weight"].shape == (128,)
    np.testing.assert_array_equal(to_float32(stored[f"{block}.norm.weight"]), norm)
    np.testing.assert_allclose(to_float32(stored[f"{block}.A_log"]).reshape(-1), np.arange(8), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", FACTS)
def test_decays_that_are_not_negative_are_refused(tmp_path, architecture):
    source = _source(tmp_path, architecture, tensors=HEAD | {"blk.0.ssm_a": np.zeros((8, 1), np.float32)})
    with pytest.raises(StartupError, match=r"A_log must be negative"):
        list(iter_stored(source, model_config(source)))


@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("falcon-h1", [0, 1, 2]), *((name, [0, 2, 4]) for name in ("granitehybrid", "nemotron_h", "nemotron_h_moe"))],
)
def test_rows_of_queries_are_put_in_order_where_the_converter_has_moved_them(tmp_path, architecture, rows):
    queries = np.arange(64, dtype=np.float32).repeat(64).reshape(64, 64)
    source = _source(tmp_path, architecture, tensors=HEAD | {"blk.1.attn_q.weight": queries})
    (stored,) = (one for one in iter_stored(source, model_config(source)) if one.name.endswith("q_proj.weight"))
    assert to_float32(stored)[:3, 0].tolist() == rows


@pytest.mark.parametrize("name", ["blk.1.ffn_norm", "blk.1.ffn_norm.weight"])
def test_falcon_h1_s_second_norm_has_either_name(tmp_path, name):
    source = _source(tmp_path, "falcon-h1", tensors=HEAD | {name: np.ones(64, np.float32)})
    names = {one.name for one in iter_stored(source, model_config(source))}
    assert "model.layers.1.post_attention_layernorm.weight" in names
