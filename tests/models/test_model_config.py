"""A ModelConfig says all there is to know of a decoder: compared with transformers and with the torch model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tureen.errors import StartupError
from tureen.layers.activation import GATED, PLAIN
from tureen.layers.rope import RopeConfig, frequencies
from tureen.models.config import ACTIVATIONS
from tureen.models.ropes import rope
from tureen.models.torch_decoder import DecoderModel
from tureen.registry import find_model
from tureen.runner.loading import describe
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored

LOW_IS_HIGH = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 4,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}

YARN = {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 32}


NO_BYTES = np.empty(0, np.uint8)
IN_MEMORY = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.gate.moe_statics.", ".mlp.gate."),
    (".self_attn.forget_gate.", ".self_attn."),
)


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_names_and_shapes_of_the_weights_are_those_of_transformers(tmp_path, variant):
    model = tiny_models.write(tmp_path, variant)
    config = describe(model_config(ModelSource("m", tmp_path, "safetensors")))
    family = find_model(config.architecture)
    renames, apart = getattr(family, "RENAMES", ()), getattr(family, "apart", lambda stored, _: [stored])
    shapes = {
        part.name: part.shape
        for name, tensor in model.state_dict().items()
        for part in apart(Stored(_renamed(name, renames), tuple(tensor.shape), "F32", NO_BYTES), config)
    }
    expected = dict(part for pair in shapes.items() for part in _apart(*pair, model.config))
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {name: _without_ones(shape) for name, shape in config.weights().items()} == expected
    with torch.device("meta"):
        built = DecoderModel(config, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in built.weights().items()} == config.weights()
    assert all(tuple(built.weight(name).shape) == shape for name, shape in config.weights().items())


def _renamed(name, renames):
    """The name here of a weight in the memory of transformers, whose files may have another."""
    for part, ours in (*renames, *IN_MEMORY):
        name = name.replace(part, ours)
    return name


def _without_ones(shape):
    return tuple(size for size in shape if size != 1)


def _apart(name, shape, config):
    """Names and shapes of the matrices that transformers keeps in one."""
    shape = _without_ones(shape)
    if name.endswith("experts.gate_up_proj"):
        num_experts, rows, columns = shape
        halves = ("gate_proj", "up_proj")
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}{i}.{half}.weight", (rows // 2, columns)) for i in range(num_experts) for half in halves]
    if name.endswith(("experts.down_proj", "experts.up_proj")):
        stem, _, part = name.rpartition(".")
        return [(f"{stem}.{index}.{part}.weight", shape[1:]) for index in range(shape[0])]
    if "gate_up_proj" in name:
        halves = (name.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj"))
        return [(half, (shape[0] // 2, shape[1])) for half in halves]
    if name.endswith(".linear_attn.conv1d.weight") and hasattr(config, "linear_num_heads"):
        return [(name.replace("conv1d", f"{letter}_conv1d"), (shape[0] // 3, shape[1])) for letter in "qkv"]
    if "qkv_proj" in name:
        size = shape[0] // (config.num_attention_heads + 2 * config.num_key_value_heads)
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        return [(name.replace("qkv", letter), (size * count, shape[1])) for letter, count in heads.items()]
    return [(name, shape)]


def test_every_activation_that_a_config_may_name_exists():
    assert set(ACTIVATIONS) == set(PLAIN) == {*GATED} - {"clamped_swiglu"}


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rotary_frequencies_are_those_of_transformers_to_the_last_bits(kind, theta, head_dim):
    rope = {"rope_type": kind, "rope_theta": theta, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    if kind == "default":
        expected = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    else:
        hf = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=65536)
        expected, _ = ROPE_INIT_FUNCTIONS[kind](hf, "cpu")
    found = frequencies(RopeConfig(theta, kind, factor=8.0), head_dim, 65536)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "yarn",
    [
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "rope_theta": 150000.0},
        {"factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 8, "beta_slow": 2.0},
        {"factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 1.25, "partial_rotary_factor": 0.5},
        {"factor": 1.0, "original_max_position_embeddings": 4096, "beta_fast": 1},
    ],
)
def test_frequencies_and_magnitude_of_yarn_are_those_of_transformers(yarn, head_dim):
    yarn = {"rope_type": "yarn", "rope_theta": 1000000.0, **yarn}
    hf = {"head_dim": head_dim, "max_position_embeddings": 32768, "num_attention_heads": 2, "hidden_size": 64}
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(rope_parameters=dict(yarn), **hf), "cpu")
    found = rope(hf, yarn)
    assert found.magnitude == pytest.approx(magnitude, rel=1e-12)
    np.testing.assert_allclose(frequencies(found, head_dim, 4096), expected.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parametrize(("factor", "context_len"), [(4.0, 4096), (0.5, 1024)])
def test_yarn_makes_the_context_longer_though_max_position_embeddings_has_not_grown(factor, context_len):
    hf = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    hf |= {"num_attention_heads": 4, "max_position_embeddings": 1024, "architectures": ["LlamaForCausalLM"]}
    hf["rope_scaling"] = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 1024}
    assert describe(hf).context_len == context_len


OF_GEMMA3N = {"num_kv_shared_layers": 0}
OF_KIMI = {"num_key_value_heads": None}
OF_DEEPSEEK = {"num_key_value_heads": None, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("architecture", "changes", "key"),
    [
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling"),
        ("LlamaForCausalLM", {"rope_theta": float("inf")}, "rope_theta"),
        ("LlamaForCausalLM", {"rope_scaling": LOW_IS_HIGH}, "low_freq_factor"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"factor": 0}}, "factor"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"mscale": -1, "mscale_all_dim": 1}}, "mscale"),
        ("LlamaForCausalLM", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta"),
        *(
            (f"{name}ForCausalLM", more | {key: "x"}, key)
            for name, more in (("Gemma3", {}), ("Gemma3n", OF_GEMMA3N))
            for key in ("rope_local_base_freq", "rope_theta")
        ),
        ("Qwen2ForCausalLM", {"layer_types": 5, "use_sliding_window": True}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": [["a"], ["b"]], "use_sliding_window": True}, "layer_types"),
        ("Qwen3ForCausalLM", {"max_window_layers": "2"}, "max_window_layers"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("MixtralForCausalLM", {"num_local_experts": 1}, "num_experts_per_tok"),
        ("Gemma3ForConditionalGeneration", {"text_config": "x"}, "text_config"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 3}, "mamba_n_heads"),
        ("GraniteMoeHybridForCausalLM", {"hidden_act": "relu2"}, "hidden_act: 'relu2' is not supported; only 'silu'"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba1", "attention"]}, "layer_types"),
        ("BambaForCausalLM", {"mamba_n_heads": 4, "mamba_n_groups": 3}, "mamba_n_groups"),
        ("BambaForCausalLM", {"mamba_n_heads": 4, "mamba_d_conv": 10}, "mamba_d_conv: must be at most 9"),
        ("BambaForCausalLM", {"mamba_n_heads": 4, "time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        ("BambaForCausalLM", {"mamba_n_heads": 4, "time_step_limit": ["a", {}]}, "time_step_limit"),
        ("BambaForCausalLM", {"attn_layer_indices": 1}, "attn_layer_indices"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 8, "ssm_multipliers": [1.0]}, "ssm_multipliers"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 8, "mlp_multipliers": 2}, "mlp_multipliers"),
        ("NemotronHForCausalLM", {}, "hybrid_override_pattern"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: must say M"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M"}, "num_hidden_layers: 2 is not"),
        ("NemotronHForCausalLM", {"layers_block_type": ["mamba", {}]}, "layers_block_type"),
        ("NemotronHForCausalLM", {"moe_latent_size": 64}, "moe_latent_size"),
        ("NemotronHForCausalLM", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "ME", "mlp_bias": True}, "mlp_bias"),
        ("Phi3ForCausalLM", {"rope_scaling": [1]}, "rope_scaling"),
        ("Gemma3nForCausalLM", OF_GEMMA3N | {"altup_active_idx": 1}, "altup_active_idx: 1 is not supported"),
        ("Gemma3nForCausalLM", OF_GEMMA3N | {"altup_num_inputs": 1}, "altup_num_inputs: must be 2 to 16, got 1"),
        (
            "Gemma3nForCausalLM",
            OF_GEMMA3N | {"intermediate_size": [96]},
            "intermediate_size: must have a size for each",
        ),
        (
            "Gemma3nForCausalLM",
            OF_GEMMA3N | {"intermediate_size": ["x", 96]},
            "intermediate_size: must have a size for",
        ),
        (
            "Gemma3nForCausalLM",
            OF_GEMMA3N | {"activation_sparsity_pattern": [0.5, 1.0]},
            "activation_sparsity_pattern: ",
        ),
        (
            "Gemma3nForCausalLM",
            {"num_kv_shared_layers": 2},
            "num_kv_shared_layers: 2 of 2 leaves no layer of each kind",
        ),
        ("KimiLinearForCausalLM", OF_KIMI | {"linear_attn_config": [1]}, "linear_attn_config: must be an object"),
        (
            "KimiLinearForCausalLM",
            OF_KIMI | {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
            "linear_attn_config: must list each of 2 layers once",
        ),
        (
            "KimiLinearForCausalLM",
            OF_KIMI | {"linear_attn_config": {"full_attn_layers": ["1"], "kda_layers": [2]}},
            "linear_attn_config: must list each of 2 layers once",
        ),
        (
            "KimiLinearForCausalLM",
            OF_KIMI | {"mlp_layer_types": ["dense"]},
            "mlp_layer_types: must say dense or sparse",
        ),
        ("KimiLinearForCausalLM", OF_KIMI | {"mla_use_nope": False}, "mla_use_nope: false is not supported"),
        ("KimiLinearForCausalLM", OF_KIMI | {"num_experts": 4}, "num_experts_per_tok"),
        ("KimiLinearForCausalLM", OF_KIMI | {"num_experts": None}, "num_experts: "),
        ("Gemma4ForCausalLM", {"global_head_dim": 7}, "head_dim: layer 1: 2 key heads of size 7 do not fit 4 heads"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2 of 2 leaves no layer of each kind"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 9}, "num_kv_shared_layers: 9 of 2 leaves no layer of each kind"),
        ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config: "),
        ("Gemma4ForCausalLM", {"per_layer_config": {"x": {}}}, "per_layer_config: 'x' is not one of 2 layers"),
        (
            "Gemma4ForCausalLM",
            {"vocab_size_per_layer_input": 7},
            "vocab_size_per_layer_input: 7 is less than vocab_size",
        ),
        ("Gemma4ForCausalLM", {"per_layer_config": [1]}, "per_layer_config: must be an object"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: "),
        ("Gemma4ForCausalLM", {"enable_moe_block": True, "num_experts": None}, "num_experts: is missing"),
        (
            "Gemma4ForCausalLM",
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3},
            "top_k_experts: 3 of 2",
        ),
        (
            "Gemma4ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 2}}},
            "rope_parameters.factor: must be 1",
        ),
        ("DeepseekV2ForCausalLM", {"num_key_value_heads": 2, "num_experts_per_tok": 2}, "num_key_value_heads: 2"),
        ("DeepseekV2ForCausalLM", OF_DEEPSEEK | {"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is odd"),
        ("DeepseekV2ForCausalLM", OF_DEEPSEEK | {"kv_lora_rank": 7}, "kv_lora_rank: 7 is odd"),
        ("DeepseekV2ForCausalLM", OF_DEEPSEEK | {"topk_method": "noaux_tc"}, "topk_method: "),
        ("DeepseekV2ForCausalLM", OF_DEEPSEEK | {"norm_topk_prob": True}, "norm_topk_prob: "),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func: "),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq: "),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"n_group": 3}, "n_group: 3 groups cannot share 256 experts evenly"),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"topk_group": 9}, "topk_group: 9 of 8 groups cannot be used"),
        (
            "DeepseekV3ForCausalLM",
            {"num_key_value_heads": None, "num_experts_per_tok": 33, "topk_group": 1},
            "topk_group: 1 groups have less than 33 experts",
        ),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ("Glm4MoeLiteForCausalLM", OF_DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func: "),
        ("Glm4MoeLiteForCausalLM", OF_DEEPSEEK | {"mlp_layer_types": ["dense", "thin"]}, "mlp_layer_types: "),
        # Numbers that would take the machine's memory before a weight is compared with them
        ("LlamaForCausalLM", {"num_hidden_layers": 1 << 50}, "num_hidden_layers: must be at most 4096"),
        ("LlamaForCausalLM", {"num_attention_heads": 1 << 40, "head_dim": 2}, "num_attention_heads: must be at most"),
        ("LlamaForCausalLM", {"max_position_embeddings": 1 << 50}, "max_position_embeddings: must be at most"),
        ("LlamaForCausalLM", {"vocab_size": 1 << 31}, "vocab_size: must be at most 2147483647"),
        ("MixtralForCausalLM", {"num_local_experts": 1 << 50}, "num_local_experts: must be at most 4096"),
        ("Qwen3MoeForCausalLM", {"num_experts": 1 << 50}, "num_experts: must be at most 4096"),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"n_routed_experts": 1 << 50}, "n_routed_experts: must be at most"),
        ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 1 << 50}, "moe_num_experts: must be at most 4096"),
        ("DeepseekV3ForCausalLM", OF_DEEPSEEK | {"first_k_dense_replace": 1 << 31}, "first_k_dense_replace: "),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_the_key_at_fault(architecture, changes, key):
    hf = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    hf |= {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": [architecture]}
    with pytest.raises(StartupError, match=key):
        describe(hf | changes)


def test_qwen_has_no_windows_where_its_config_switches_them_off():
    hf = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    hf |= {"num_attention_heads": 4, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
    hf["architectures"] = ["Qwen2ForCausalLM"]
    assert describe(hf | {"use_sliding_window": False}).windows == (None, None)
    assert describe(hf | {"use_sliding_window": True}).windows == (8, 8)


def test_the_cache_of_latent_attention_holds_the_latent_and_what_positions_turn():
    """A ninth of the keys and values of all heads, for DeepSeek-V2-Lite."""
    hf = {"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27}
    hf |= {"num_attention_heads": 16, "q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
    described = describe(hf | {"architectures": ["DeepseekV2ForCausalLM"]})
    assert [layer.numbers for layer in described.kv_layers] == [512 + 64] * 27
    assert described.attention_scale == pytest.approx(192**-0.5)


HARMLESS = {
    "tokens, names and versions": "_name_or_path bos_token_id eos_token_id pad_token_id sep_token_id eod_token_id "
    "model_type transformers_version id2label label2id problem_type",
    "what transformers returns": "output_attentions output_hidden_states output_router_logits return_dict use_cache "
    "num_logits_to_keep",
    "training": "attention_dropout residual_dropout embedding_dropout embd_pdrop resid_pdrop initializer_range "
    "router_aux_loss_coef router_jitter_noise input_jitter_noise hidden_dropout rescale_prenorm_residual "
    "z_loss_coefficient time_step_max time_step_floor altup_coef_clip",
    "how it is computed, not what": "dtype chunk_size_feed_forward pretraining_tp mamba_chunk_size chunk_size "
    "use_mamba_kernels mamba_ssm_cache_dtype residual_in_fp32 moe_shared_expert_overlap",
    "other kinds of models": "is_encoder_decoder",
}
"""Reason -> keys of config.json that change no output."""
OF_LATENT = {"head_dim": "qk_rope_head_dim", "qk_head_dim": "qk_nope_head_dim and qk_rope_head_dim"}
INSTEAD = {
    "SmolLM3": {"no_rope_layer_interval": "no_rope_layers", "sliding_window": "layer_types",
                "use_sliding_window": "layer_types", "layer_types": "use_sliding_window"},
    "Gemma": {"hidden_act": "hidden_activation"},
    "Gemma3Text": {"_sliding_window_pattern": "layer_types"},
    "Exaone4": {"sliding_window_pattern": "layer_types"},
    "Qwen2Moe": {"layer_types": "use_sliding_window", "sliding_window": "use_sliding_window",
                 "use_sliding_window": "layer_types", "max_window_layers": "layer_types"},
    "Qwen3": {"layer_types": "use_sliding_window", "sliding_window": "use_sliding_window",
              "use_sliding_window": "layer_types", "max_window_layers": "layer_types"},
    "Qwen3Moe": {"sliding_window": "use_sliding_window", "use_sliding_window": "sliding_window"},
    "Qwen2": {"max_window_layers": "layer_types"},
    "Starcoder2": {"rms_norm_eps": "norm_epsilon"},
    "Cohere": {"rms_norm_eps": "layer_norm_eps"},
    "Cohere2": {"rms_norm_eps": "layer_norm_eps"},
    "Lfm2": {"rms_norm_eps": "norm_eps", "full_attn_idxs": "layer_types"},
    "Ernie4_5_Moe": {"moe_norm_min": "nothing: a sum of probabilities is larger"},
    "Phi3": {"original_max_position_embeddings": "rope_parameters, if they are longrope"},
    "NemotronH": {"rms_norm_eps": "layer_norm_epsilon", "expand": "mamba_num_heads and mamba_head_dim",
                  "num_nextn_predict_layers": "nothing: further tokens are not predicted",
                  "mtp_layers_block_type": "nothing: further tokens are not predicted",
                  "time_step_min": "time_step_limit; transformers alone takes it for the least time step"},
    "FalconH1": {"mamba_expand": "mamba_d_ssm"},
    "DeepseekV2": OF_LATENT,
    "DeepseekV3": OF_LATENT,
    "Glm4MoeLite": {**OF_LATENT, "first_k_dense_replace": "mlp_layer_types"},
    "MiniCPM3": OF_LATENT,
    "KimiLinear": OF_LATENT,
}  # fmt: skip
"""Family -> key -> the key that decides in its place, in the configs of the variants."""


def _others(value):
    """Other values of a key, of which one must matter."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 2, max(1, value // 2)]
    if isinstance(value, float):
        return [1.5 * value + 0.25]
    if isinstance(value, list):
        return [value[:-1], value[::-1], value + value[:1], [0]]
    if isinstance(value, dict):
        return [{"rope_type": "unknown"}]
    return ["unknown", True, 3, 0.5, [1]]


def _unread(family, changes):
    """The keys of a config that may have other values without a change of what it describes."""
    hf = json.loads(getattr(transformers, f"{family}Config")(**(tiny_models.SHAPE | changes)).to_json_string(False))
    hf["architectures"] = [f"{family.removesuffix('Text')}ForCausalLM"]
    described = describe(hf)

    def matters(key, value):
        try:
            return describe({**hf, key: value}) != described
        except StartupError:
            return True

    return {key for key, value in hf.items() if not any(matters(key, other) for other in _others(value))}


@pytest.mark.parametrize("family", dict.fromkeys(family for family, _ in tiny_models.VARIANTS.values()))
@pytest.mark.filterwarnings("ignore")
def test_a_key_of_a_config_is_read_or_refused_or_known_to_change_nothing(family):
    unread = set.intersection(
        *(_unread(family, changes) for own, changes in tiny_models.VARIANTS.values() if own == family)
    )
    known = {*" ".join(HARMLESS.values()).split(), *INSTEAD.get(family, ())}
    assert unread - known == set()
